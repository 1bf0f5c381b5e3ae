"""The routes that show and change the gray release: behind the control token, with If-Match and Idempotency-Key.

Who asks is what the token holder says in X-Operator; what a change has to bring along is in `preconditions`. Invariant:
the reply to an abort comes when no gateway serves the candidate release any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.errors import InvalidInput, RedisUnavailable, ReleaseRefused, TrirankError
from reranker.gateway.auth import holds_token
from reranker.gateway.parts import Parts
from reranker.gateway.preconditions import Handle, once, version_in
from reranker.gateway.problems import Problem, invalid
from reranker.gateway.schemas import parse, text_id
from reranker.gateway.served import check_name, prepare
from reranker.gray.audit import Entry
from reranker.gray.bodies import AssignmentView, Change, EventList, ReleaseList, ReleaseView, Weight
from reranker.gray.control import Acknowledged, NotReady, UnknownRelease, VersionConflict
from reranker.gray.plan import Plan
from reranker.gray.split import assign
from reranker.gray.state import Action, TransitionRefused, split_of
from reranker.gray.store import Conflict, Current

ACTIONS: dict[Action, str] = {
    "start": "Show the candidate release to the users of the first step",
    "pause": "Keep the weight, take no further step",
    "resume": "Go on; the hold of the step begins again",
    "promote": "The candidate release serves everybody from now on; needs the last step and healthy gates",
    "abort": "Take the candidate release away from everybody; returns when every gateway has said so",
    "rollback": "After a promotion: back to the release before; returns when every gateway has said so",
}
WATCH_EVERY_S = 1.0
MAX_WHO = 80
# Changes that are done when every gateway follows them.
ACKNOWLEDGED: tuple[Action, ...] = ("start", "promote", "abort", "rollback")
_encode = msgspec.json.Encoder().encode


def add_release_routes(app: FastAPI, parts: Parts) -> None:
    """Add all routes under /v1/releases; `openapi_releases` describes them."""
    operators = _Operators(parts)
    path = "/v1/releases/{name}"

    def route(where: str, method: str, handle: Handle) -> None:
        changes = method != "GET"
        app.add_route(where, operators.guarded(handle, changes=changes), methods=[method], include_in_schema=False)

    route("/v1/releases", "POST", operators.create)
    route("/v1/releases", "GET", operators.listed)
    for action in ACTIONS:
        route(f"{path}:{action}", "POST", operators.changing(action))
    route(f"{path}/analysis", "GET", operators.analysis)
    route(f"{path}/events", "GET", operators.events)
    route(f"{path}/assignment", "GET", operators.assignment)
    route(path, "PATCH", operators.weigh)
    route(path, "GET", operators.shown)


class _Operators:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._control = parts.control
        self._store = parts.control.store

    def guarded(self, handle: Handle, *, changes: bool) -> Callable[[Request], Awaitable[Response]]:
        """The handler for those who show the token, with every error as a problem; a change is made once."""

        async def guarded(request: Request) -> Response:
            try:
                if not holds_token(request.headers.get("authorization", "").encode(), self._parts.control_token):
                    raise Problem("unauthorized", "Show the control token: Authorization: Bearer TOKEN")
                return await (once(self._store, request, handle) if changes else handle(request))
            except Problem as problem:
                return problem.response()
            except TrirankError as error:
                return _problem(error).response()

        return guarded

    async def create(self, request: Request) -> Response:
        plan = parse(await request.body(), Plan)
        current = await self._control.create(plan, who=_who(request), verify=_verify)
        return self._view(current, 201)

    async def listed(self, request: Request) -> Response:
        current = await self._store.current()
        return _json(ReleaseList([] if current.release is None else [ReleaseView.of(current)]))

    async def shown(self, request: Request) -> Response:
        return self._view(await self._control.get(_name(request)))

    def changing(self, action: Action) -> Handle:
        """The handler of one action."""

        async def change(request: Request) -> Response:
            body = await request.body()
            why = parse(body, Change).why if body else ""
            current = await self._control.act(
                _name(request), action, who=_who(request), why=why, if_match=version_in(request)
            )
            if action not in ACKNOWLEDGED:
                return self._view(current)
            return self._view(current, acknowledged=await self._control.acknowledged(current))

        return change

    async def weigh(self, request: Request) -> Response:
        asked = parse(await request.body(), Weight)
        current = await self._control.act(
            _name(request), "weight", who=_who(request), why=asked.why, if_match=version_in(request),
            weight_ppm=asked.weight_ppm,
        )  # fmt: skip
        return self._view(current)

    async def analysis(self, request: Request) -> Response:
        return _json(await self._control.analysis(_name(request)))

    async def assignment(self, request: Request) -> Response:
        user_id = request.query_params.get("user_id")
        if user_id is None:
            raise invalid("user_id", "Expected a query parameter user_id")
        current = await self._control.get(_name(request))
        if current.release is None:
            raise UnknownRelease("there is no gray release")
        split = split_of(current.release, current.version)
        found = assign(split, text_id(user_id, "user_id"), user_id)
        return _json(
            AssignmentView(
                user_id=user_id,
                release=found.release,
                arm=found.arm,
                bucket_ppm=found.bucket_ppm,
                reason=found.reason,
                compared=found.compared,
                weight_ppm=split.weight_ppm,
                version=split.version,
            )
        )

    async def events(self, request: Request) -> Response:
        name = _name(request)
        entries = await self._of(name)
        if "text/event-stream" not in request.headers.get("accept", ""):
            return _json(EventList(entries))
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isdecimal() else 0
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._stream(name, after), headers=headers, media_type="text/event-stream")

    async def _of(self, name: str) -> list[Entry]:
        entries = [entry for entry in await self._store.audit() if entry.release == name]
        if not entries:
            raise UnknownRelease(f"there is no gray release {name!r}")
        return entries

    async def _stream(self, name: str, after: int) -> AsyncIterator[bytes]:
        """Every change after number `after` and to come, and each new verdict."""
        last = b""
        while True:
            try:
                entries = await self._of(name)
                analysis = _encode(await self._control.analysis(name))
            except (RedisUnavailable, UnknownRelease):
                entries, analysis = [], last
            for entry in entries:
                if entry.seq > after:
                    yield b"id: %d\nevent: change\ndata: %s\n\n" % (entry.seq, _encode(entry))
                    after = entry.seq
            if analysis not in (last, b"null"):
                yield b"event: analysis\ndata: %s\n\n" % analysis
                last = analysis
            await asyncio.sleep(WATCH_EVERY_S)

    def _view(self, current: Current, status: int = 200, acknowledged: Acknowledged | UnsetType = UNSET) -> Response:
        view = ReleaseView.of(current, acknowledged)
        return _json(view, status, {"etag": f'"{view.version}"'})


async def _verify(plan: Plan) -> None:
    """Raises ReleaseRefused when the directory is not the candidate, whole, and with a schema this version serves."""
    prepared = await asyncio.to_thread(prepare, Path(plan.path), verify_files=True)
    check_name(prepared.release, plan.candidate)


_PROBLEMS: dict[type[Exception], str] = {
    UnknownRelease: "unknown-release",
    VersionConflict: "version-conflict",
    TransitionRefused: "not-now",
    NotReady: "release-not-ready",
    Conflict: "not-now",
    RedisUnavailable: "redis-unavailable",
}


def _problem(error: Exception) -> Problem:
    if isinstance(error, InvalidInput):
        return invalid(error.field, error.detail)
    if isinstance(error, ReleaseRefused):
        return invalid("path", str(error))
    return Problem(next((slug for kind, slug in _PROBLEMS.items() if isinstance(error, kind)), "internal"), str(error))


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _who(request: Request) -> str:
    return request.headers.get("x-operator", "operator")[:MAX_WHO]


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, "application/json")
