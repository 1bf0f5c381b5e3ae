"""The routes of the two pages, the operator's and the API's: static files, and headers that let a page talk to nobody
but this gateway.

The console asks for the control token itself; what it shows comes from /v1/releases. The API's page is Swagger UI over
/openapi.json, from the package `fastapi-swagger`. Invariant: nothing is loaded from elsewhere, and nothing that is
served here depends on the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_OURS, _SWAGGER_UI = "reranker.console", "fastapi_swagger.resources"
_HTML, _CSS, _SCRIPT = (f"text/{kind}; charset=utf-8" for kind in ("html", "css", "javascript"))
_FILES = {
    "/console": (_OURS, "index.html", _HTML),
    "/console/console.css": (_OURS, "console.css", _CSS),
    "/console/console.js": (_OURS, "console.js", _SCRIPT),
    "/docs": (_OURS, "docs.html", _HTML),
    "/docs/docs.js": (_OURS, "docs.js", _SCRIPT),
    "/docs/swagger-ui.css": (_SWAGGER_UI, "swagger-ui.css", _CSS),
    "/docs/swagger-ui-bundle.js": (_SWAGGER_UI, "swagger-ui-bundle.js", _SCRIPT),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_pages(app: FastAPI) -> None:
    """Add the pages under /console and /docs."""
    for path, (package, name, kind) in _FILES.items():
        app.add_route(path, _file(files(package).joinpath(name).read_bytes(), kind), include_in_schema=False)


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def get(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return get
