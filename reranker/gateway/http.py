"""The HTTP face: routes, and every error as problem+json.

The busy routes are those of `busy.py`; FastAPI serves the rest and the documentation, and knows the busy ones too, so
that a wrong method for them is said to be one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from infra.metrics import exposition
from reranker.gateway.busy import Front, busy_endpoints
from reranker.gateway.config import GatewayConfig
from reranker.gateway.openapi import describe
from reranker.gateway.operators import add_release_routes
from reranker.gateway.pages import add_pages
from reranker.gateway.parts import Parts, open_parts
from reranker.gateway.problems import Problem

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_encode = msgspec.json.Encoder().encode


@asynccontextmanager
async def opened_app(config: GatewayConfig) -> AsyncIterator[ASGIApp]:
    """The application over parts that live as long as the context."""
    async with open_parts(config) as parts:
        yield create_app(parts)


def create_app(parts: Parts) -> ASGIApp:
    """The application over its parts; starts and stops nothing itself."""
    app = FastAPI(title="Trirank", docs_url=None, redoc_url=None, redirect_slashes=False)
    busy = busy_endpoints(parts)
    for path, endpoint in busy.items():
        app.add_route(path, endpoint, methods=["POST"], name=path, include_in_schema=False)  # type: ignore[arg-type]
    _add_operator_routes(app, parts)
    add_release_routes(app, parts)
    add_pages(app)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, _internal_problem)
    describe(app)
    return Front(app, busy)


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


def _json(content: object, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
