"""The routes that show and change the gray release: behind the control token, with If-Match and Idempotency-Key.

A change that names a version somebody else has moved on from is refused (412), one that was made before with the same
Idempotency-Key gets the same reply again. Who asks is what the token holder says in X-Operator. Invariant: the reply to
an abort comes after every live gateway has stopped to assign the candidate release, or names those that did not say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.errors import InvalidInput, RedisUnavailable, ReleaseRefused, TrirankError
from reranker.gateway.auth import holds_token
from reranker.gateway.parts import Parts
from reranker.gateway.problems import Problem, invalid
from reranker.gateway.schemas import parse, text_id
from reranker.gateway.served import check_name, prepare
from reranker.gray.audit import Entry
from reranker.gray.bodies import Change, ReleaseView, Weight
from reranker.gray.control import NotReady, UnknownRelease, VersionConflict
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
_encode = msgspec.json.Encoder().encode

Handle = Callable[[Request], Awaitable[Response]]


def add_release_routes(app: FastAPI, parts: Parts) -> None:
    """Add all routes under /v1/releases."""
    operators = _Operators(parts)
    path = "/v1/releases/{name}"
    route = app.add_api_route
    guarded = operators.guarded
    route("/v1/releases", guarded(operators.create), methods=["POST"], status_code=201, summary="Plan a gray release")
    route("/v1/releases", guarded(operators.listed), methods=["GET"], summary="The gray release now")
    for action, summary in ACTIONS.items():
        handle = guarded(operators.changing(action))
        route(f"{path}:{action}", handle, methods=["POST"], name=action, summary=summary)
    route(f"{path}/analysis", guarded(operators.analysis), methods=["GET"], summary="The newest verdict of every gate")
    route(f"{path}/events", guarded(operators.events), methods=["GET"], summary="Audit log; as a stream when asked so")
    route(f"{path}/assignment", guarded(operators.assignment), methods=["GET"], summary="Which arm a user has, and why")
    route(path, guarded(operators.weigh), methods=["PATCH"], summary="Set the weight by hand")
    route(path, guarded(operators.shown), methods=["GET"], summary="One gray release")


class _Operators:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._control = parts.control
        self._store = parts.control.store

    def guarded(self, handle: Handle) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the token, with what goes wrong as problem+json."""

        async def guarded(request: Request) -> Response:
            try:
                if not holds_token(request.headers.get("authorization", "").encode(), self._parts.control_token):
                    raise Problem("unauthorized", "Show the control token: Authorization: Bearer TOKEN")
                return await self._once(request, handle)
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
        return _json({"releases": [] if current.release is None else [ReleaseView.of(current)]})

    async def shown(self, request: Request) -> Response:
        return self._view(await self._control.get(_name(request)))

    def changing(self, action: Action) -> Handle:
        """The handler of one action."""

        async def change(request: Request) -> Response:
            body = await request.body()
            why = parse(body, Change).why if body else ""
            current = await self._control.act(
                _name(request), action, who=_who(request), why=why, if_match=_if_match(request)
            )
            if action not in ("abort", "rollback", "promote", "start"):
                return self._view(current)
            acknowledged = await self._control.acknowledged(current)
            return self._view(current, more={"acknowledged": acknowledged})

        return change

    async def weigh(self, request: Request) -> Response:
        asked = parse(await request.body(), Weight)
        current = await self._control.act(
            _name(request), "weight", who=_who(request), why=asked.why, if_match=_if_match(request),
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
        return _json({"user_id": user_id, **found._asdict(), "weight_ppm": split.weight_ppm, "version": split.version})

    async def events(self, request: Request) -> Response:
        name = _name(request)
        entries = await self._of(name)
        if "text/event-stream" not in request.headers.get("accept", ""):
            return _json({"events": entries})
        return StreamingResponse(self._stream(name), media_type="text/event-stream")

    async def _of(self, name: str) -> list[Entry]:
        entries = [entry for entry in await self._store.audit() if entry.release == name]
        if not entries:
            raise UnknownRelease(f"there is no gray release {name!r}")
        return entries

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        """Every change so far and to come, and each new verdict."""
        told, last = 0, b""
        while True:
            try:
                entries = await self._of(name)
                analysis = _encode(await self._control.analysis(name)) if entries else b""
            except (RedisUnavailable, UnknownRelease):
                entries, analysis = [], last
            for entry in entries[told:]:
                yield b"id: %d\nevent: change\ndata: %s\n\n" % (entry.seq, _encode(entry))
            told = max(told, len(entries))
            if analysis not in (last, b"null"):
                yield b"event: analysis\ndata: %s\n\n" % analysis
                last = analysis
            await asyncio.sleep(WATCH_EVERY_S)

    async def _once(self, request: Request, handle: Handle) -> Response:
        key = request.headers.get("idempotency-key", "")
        if not key or request.method == "GET":
            return await handle(request)
        key = f"{request.method} {request.url.path} {key}"
        if (before := await self._store.replied(key)) is not None:
            return Response(before, media_type="application/json", headers={"idempotent-replay": "true"})
        response = await handle(request)
        await self._store.reply(key, bytes(response.body))
        return response

    def _view(self, current: Current, status: int = 200, more: dict[str, Any] | None = None) -> Response:
        view = ReleaseView.of(current)
        return _json({**msgspec.to_builtins(view), **(more or {})}, status, {"etag": f'"{view.version}"'})


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
    return Problem(_PROBLEMS.get(type(error), "internal"), str(error))


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _who(request: Request) -> str:
    return request.headers.get("x-operator", "operator")[:MAX_WHO]


def _if_match(request: Request) -> int | None:
    given = request.headers.get("if-match")
    if given is None or given == "*":
        return None
    version = given.strip().strip('"')
    if not version.isdecimal():
        raise Problem("version-conflict", f"If-Match is the version in quotes, not {given[:80]}")
    return int(version)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, "application/json")
