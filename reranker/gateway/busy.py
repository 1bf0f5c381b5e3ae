"""The three busy routes as plain ASGI: they read the raw body whatever its content type says (so that `curl -d` works)
and write msgspec's bytes. `Front` puts them before the framework, whose layers cost as much as a stage does.

Invariant: a request that was admitted and is valid gets a 200 (feedback: 202, or 503 when the log did not acknowledge),
and every error is a problem+json.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from reranker.gateway.auth import holds_token
from reranker.gateway.counting import INTERNAL, attribute, outcome_of
from reranker.gateway.metrics import INTERNAL_ERRORS, REQUESTS, SECONDS
from reranker.gateway.parts import Parts
from reranker.gateway.problems import Problem
from reranker.gateway.query import Query, query_of
from reranker.gateway.schemas import (
    FeedbackReply,
    FeedbackRequest,
    RankRequest,
    RecommendReply,
    RecommendRequest,
    parse,
)
from reranker.gray.attribution import REQUEST_BYTES
from reranker.gray.split import Arm, Assignment
from reranker.gray.tally import ARMS

logger = logging.getLogger(__name__)

ARM_HEADER = b"x-trirank-arm"
MAX_BODY_BYTES = 1024 * 1024
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_JSON = (b"content-type", b"application/json")
_encode = msgspec.json.Encoder().encode

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON reply with what else its headers say, and something to do once it has been sent."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()
    after: Callable[[], None] | None = None


Handler = Callable[[Scope, Receive], Awaitable[Answer]]


class Endpoint:
    """One route: its handler, with what goes wrong turned into problems and counted."""

    def __init__(self, route: str, handle: Handler) -> None:
        self._route = route
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            answer = await self._handle(scope, receive)
        except ClientDisconnect:
            REQUESTS.labels(self._route, "disconnected", "").inc()
            return
        except Problem as problem:
            await self._refuse(problem, scope, receive, send)
            return
        except Exception:  # the outermost loop of a request
            logger.exception("a request failed", extra={"route": self._route})
            await self._refuse(Problem("internal", "The gateway's log has the details"), scope, receive, send)
            return
        headers = [_JSON, (b"content-length", b"%d" % len(answer.body)), *answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        if answer.after is not None:
            answer.after()

    async def _refuse(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        REQUESTS.labels(self._route, str(problem.status), "").inc()
        await problem.response()(scope, receive, send)


class Front:
    """Takes a POST to a busy route straight to its endpoint; everything else is the framework's."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self._app(scope, receive, send)


def busy_endpoints(parts: Parts) -> dict[str, Endpoint]:
    """The busy routes by path."""
    handlers = {
        "/v1/recommend": _ranking(parts, "/v1/recommend", lambda body: parse(body, RecommendRequest)),
        "/v1/rank": _ranking(parts, "/v1/rank", lambda body: parse(body, RankRequest)),
        "/v1/feedback": _feedback(parts),
    }
    return {route: Endpoint(route, handle) for route, handle in handlers.items()}


def _ranking(parts: Parts, route: str, parsed: Callable[[bytes], RecommendRequest | RankRequest]) -> Handler:
    seconds = {arm: SECONDS.labels(route, arm) for arm in ARMS}
    answered = {arm: REQUESTS.labels(route, "200", arm) for arm in ARMS}

    async def handle(scope: Scope, receive: Receive) -> Answer:
        start_s = time.monotonic()
        with parts.admission:
            trace = _TRACEPARENT.fullmatch(_header(scope, b"traceparent"))
            query = query_of(
                parsed(await _body(scope, receive)),
                nonce=os.urandom(REQUEST_BYTES),
                trace_id=trace[1].decode() if trace else None,
                start_s=start_s,
                default_deadline_ms=parts.default_deadline_ms,
            )
            assigned = _assigned(parts, query, scope)
            with parts.arms.flying(assigned):
                reply = await _answered(parts, query, assigned)
            if not parts.arms.stands(assigned):
                assigned = parts.arms.withdrawn(assigned)
                reply = await _answered(parts, query, assigned)
            content = _encode(reply)
        took_s = time.monotonic() - start_s
        parts.arms.tally.answered(assigned, outcome_of(query, reply, took_s))
        seconds[assigned.arm].observe(took_s)
        answered[assigned.arm].inc()
        headers = _headers(reply, query, trace[0] if trace else None)
        return Answer(200, content, headers, lambda: _sent(parts, query, reply, assigned, took_s))

    return handle


def _sent(parts: Parts, query: Query, reply: RecommendReply, assigned: Assignment, took_s: float) -> None:
    """What is done when an answer has left."""
    parts.impressions.offer(query, reply)
    if assigned.epoch:
        parts.shadow.sent(query, reply, assigned, took_s)


def _assigned(parts: Parts, query: Query, scope: Scope) -> Assignment:
    """The arm of a request; a caller who shows the control token may choose it."""
    kind = parts.arms.split.unit
    header = _header(scope, kind[len("header:") :].lower().encode()).decode("latin-1") if ":" in kind else None
    asked = _header(scope, ARM_HEADER)
    forced: Arm | None = None
    if asked and holds_token(_header(scope, b"authorization"), parts.control_token):
        forced = "candidate" if asked == b"candidate" else "stable" if asked == b"stable" else None
    return parts.arms.assign(
        user_id=query.user_id,
        session_id=query.session_id,
        request_id=query.request_id,
        header=header,
        forced=forced,
    )


async def _answered(parts: Parts, query: Query, assigned: Assignment) -> RecommendReply:
    """The pipeline's reply; popular items when it has a bug, so that a page is never empty because of us."""
    pipeline = parts.releases.pipeline(assigned.release)
    try:
        return await pipeline.answer(query, assigned)
    except Exception:  # the outermost loop of a request
        logger.exception("a request failed and is answered with popular items", extra={"trace_id": query.trace_id})
        INTERNAL_ERRORS.inc()
        return pipeline.fallback(query, assigned, INTERNAL)


def _feedback(parts: Parts) -> Handler:
    async def handle(scope: Scope, receive: Receive) -> Answer:
        events = parse(await _body(scope, receive), FeedbackRequest).events
        await parts.feedback.accept(events)
        attribute(events, parts.signer, parts.arms.tally)
        REQUESTS.labels("/v1/feedback", "202", "").inc()
        return Answer(202, _encode(FeedbackReply(len(events))))

    return handle


def _header(scope: Scope, wanted: bytes) -> bytes:
    """Value of a request header, empty when it is not there."""
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return b""


async def _body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises Problem (413) as soon as it is known to be too large, ClientDisconnect."""
    declared = _header(scope, b"content-length")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return body


def _headers(reply: RecommendReply, query: Query, traceparent: bytes | None) -> tuple[Header, ...]:
    timing = ", ".join([f"{name};dur={took_ms}" for name, took_ms in reply.timing_ms.items()])
    headers = [(b"server-timing", timing.encode()), (b"x-release-arm", reply.release.arm.encode())]
    if traceparent:
        headers.append((b"traceparent", traceparent))
    # Ids come from outside: only what is a legal header value goes into one.
    if _HEADER_VALUE.fullmatch(query.request_id):
        headers.append((b"x-request-id", query.request_id.encode()))
    return tuple(headers)


def _too_large() -> Problem:
    return Problem("too-large", f"At most {MAX_BODY_BYTES} bytes")
