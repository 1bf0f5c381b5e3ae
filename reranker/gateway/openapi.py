"""The OpenAPI description: the msgspec models of the busy routes added to what FastAPI knows of the others.

Describes only. Invariant: the schemas are generated from the very structs that parse and encode.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from reranker.gateway.openapi_releases import MODELS, describe_releases
from reranker.gateway.schemas import (
    FeedbackReply,
    FeedbackRequest,
    ProblemBody,
    RankRequest,
    RecommendReply,
    RecommendRequest,
)

_REF = "#/components/schemas/{name}"
_ROUTES: tuple[tuple[str, str, type, str, type, tuple[str, ...]], ...] = (
    ("/v1/recommend", "Recommend items", RecommendRequest, "200", RecommendReply, ("400", "413", "422", "503")),
    ("/v1/rank", "Rank given candidates", RankRequest, "200", RecommendReply, ("400", "413", "422", "503")),
    ("/v1/feedback", "Tell what users did", FeedbackRequest, "202", FeedbackReply, ("400", "413", "422", "503")),
)
_DESCRIPTIONS = {
    "200": "Ranked items",
    "202": "The log has acknowledged every event",
    "400": "The body is not JSON",
    "413": "The body is too large",
    "422": "A field is not valid; the problem names it",
    "503": "At the limit, or the log does not acknowledge; see Retry-After",
}


def describe(app: FastAPI) -> None:
    """Make the application answer `/openapi.json` with all routes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    models: list[type] = [ProblemBody, *(model for route in _ROUTES for model in (route[2], route[4])), *MODELS]
    schemas, components = msgspec.json.schema_components(dict.fromkeys(models), ref_template=_REF)
    ref = dict(zip(dict.fromkeys(models), schemas, strict=True))
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, summary, asked, status, reply, errors in _ROUTES:
        problem = {"application/problem+json": {"schema": ref[ProblemBody]}}
        answer = {"application/json": {"schema": ref[reply]}}
        document["paths"][path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": ref[asked]}}},
                "responses": {
                    status: {"description": _DESCRIPTIONS[status], "content": answer},
                    **{code: {"description": _DESCRIPTIONS[code], "content": problem} for code in errors},
                },
            }
        }
    describe_releases(document, ref)
    return document
