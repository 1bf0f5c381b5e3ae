"""The HTTP face: routes, bodies, headers, and every error as problem+json.

The three busy routes are plain Starlette routes that read the raw body whatever its content type says (so that
`curl -d` works) and write msgspec's bytes; FastAPI serves the rest and the documentation. Invariant: a request that
was admitted and is valid gets a 200 (feedback: 202, or 503 when the log did not acknowledge).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.metrics import exposition
from reranker.gateway.metrics import INTERNAL_ERRORS, REQUESTS, SECONDS
from reranker.gateway.openapi import describe
from reranker.gateway.parts import GatewayConfig, Parts, open_parts
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

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1024 * 1024
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_encode = msgspec.json.Encoder().encode

Handler = Callable[[Request], Awaitable[Response]]


class _Answer(Response):
    """A JSON response with something to do once it has been sent."""

    media_type = "application/json"

    def __init__(self, content: bytes, status: int, headers: dict[str, str], after: Callable[[], None]) -> None:
        super().__init__(content, status, headers)
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._after()


@asynccontextmanager
async def opened_app(config: GatewayConfig) -> AsyncIterator[ASGIApp]:
    """The application over parts that live as long as the context."""
    async with open_parts(config) as parts:
        yield create_app(parts)


def create_app(parts: Parts) -> FastAPI:
    """The application over its parts; starts and stops nothing itself."""
    app = FastAPI(title="Trirank", docs_url="/docs", redoc_url=None, redirect_slashes=False)
    busy = {
        "/v1/recommend": _ranking(parts, "/v1/recommend", lambda body: parse(body, RecommendRequest)),
        "/v1/rank": _ranking(parts, "/v1/rank", lambda body: parse(body, RankRequest)),
        "/v1/feedback": _feedback(parts),
    }
    for path, handler in busy.items():
        app.add_route(path, _guarded(path, handler), methods=["POST"], include_in_schema=False)
    _add_operator_routes(app, parts)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, _internal_problem)
    describe(app)
    return app


def _ranking(parts: Parts, route: str, parsed: Callable[[bytes], RecommendRequest | RankRequest]) -> Handler:
    seconds = SECONDS.labels(route, "stable")
    answered = REQUESTS.labels(route, "200", "stable")

    async def handle(request: Request) -> Response:
        start_s = time.monotonic()
        with parts.admission:
            trace = _TRACEPARENT.fullmatch(request.headers.get("traceparent", ""))
            query = query_of(
                parsed(await _body(request)),
                recommendation_id=uuid.uuid4().hex,
                trace_id=trace[1] if trace else None,
                start_s=start_s,
                default_deadline_ms=parts.default_deadline_ms,
            )
            reply = await _answered(parts, query)
            content = _encode(reply)
        seconds.observe(time.monotonic() - start_s)
        answered.inc()
        headers = _headers(reply, query, trace[0] if trace else None)
        return _Answer(content, 200, headers, lambda: parts.impressions.offer(query, reply))

    return handle


async def _answered(parts: Parts, query: Query) -> RecommendReply:
    """The pipeline's reply; popular items when it has a bug, so that a page is never empty because of us."""
    try:
        return await parts.pipeline.answer(query)
    except Exception:  # the outermost loop of a request
        logger.exception("a request failed and is answered with popular items", extra={"trace_id": query.trace_id})
        INTERNAL_ERRORS.inc()
        return parts.pipeline.fallback(query, "internal")


def _feedback(parts: Parts) -> Handler:
    async def handle(request: Request) -> Response:
        events = parse(await _body(request), FeedbackRequest).events
        await parts.feedback.accept(events)
        REQUESTS.labels("/v1/feedback", "202", "").inc()
        return Response(_encode(FeedbackReply(len(events))), 202, media_type="application/json")

    return handle


def _add_operator_routes(app: FastAPI, parts: Parts) -> None:
    @app.get("/livez", summary="Whether this gateway process runs")
    async def livez() -> Response:
        return _json({"alive": True})

    @app.get("/readyz", summary="Whether every part of the stack is ready", responses={503: {}})
    async def readyz() -> Response:
        readiness = await parts.status.readiness()
        return _json(readiness, 200 if readiness["ready"] else 503)

    @app.get("/metrics", summary="Numbers of every process of this machine, for Prometheus")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(exposition), media_type=METRICS_TYPE)

    @app.get("/v1/status", summary="Release, processes, shards, Redis and Kafka")
    async def status() -> Response:
        return _json(await parts.status.report())


def _guarded(route: str, handle: Handler) -> Handler:
    """The handler with its problems turned into replies and counted."""

    async def guarded(request: Request) -> Response:
        try:
            return await handle(request)
        except Problem as problem:
            REQUESTS.labels(route, str(problem.status), "").inc()
            return problem.response()
        except ClientDisconnect:
            REQUESTS.labels(route, "disconnected", "").inc()
            return Response(status_code=400)

    return guarded


async def _body(request: Request) -> bytes:
    """The whole body. Raises Problem (413) as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _headers(reply: RecommendReply, query: Query, traceparent: str | None) -> dict[str, str]:
    headers = {
        "server-timing": ", ".join(f"{name};dur={took_ms}" for name, took_ms in reply.timing_ms.items()),
        "x-release-arm": reply.release.arm,
    }
    if traceparent:
        headers["traceparent"] = traceparent
    # Ids come from outside: only what is a legal header value goes into one.
    if _HEADER_VALUE.fullmatch(query.request_id):
        headers["x-request-id"] = query.request_id
    return headers


async def _http_problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        problem = Problem("method-not-allowed", f"{request.method} is not for {request.url.path}")
    else:
        problem = Problem("not-found", f"There is nothing at {request.url.path}")
    response = problem.response()
    response.headers.update(error.headers or {})
    return response


async def _internal_problem(request: Request, error: Exception) -> Response:
    return Problem("internal", "The gateway's log has the details").response()


def _too_large() -> Problem:
    return Problem("too-large", f"At most {MAX_BODY_BYTES} bytes")


def _json(content: object, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
