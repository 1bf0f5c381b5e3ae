"""The routes of the operator's page: three static files, and headers that let the page talk to nobody but this gateway.

The page asks for the control token itself; what it shows comes from /v1/releases. Invariant: nothing is loaded from
elsewhere, and nothing that is served here depends on the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_FILES = {
    "/console": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_console(app: FastAPI) -> None:
    """Add the page under /console."""
    for path, (name, kind) in _FILES.items():
        app.add_route(path, _file(files("reranker.console").joinpath(name).read_bytes(), kind), include_in_schema=False)


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def get(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return get
