"""The OpenAPI description of the routes under /v1/releases: bodies, headers, replies and problems of each.

Describes only. Invariant: the schemas are generated from the very structs that parse and encode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reranker.gateway.operators import ACTIONS
from reranker.gateway.schemas import ProblemBody
from reranker.gray.bodies import AssignmentView, Change, EventList, ReleaseList, ReleaseView, Weight
from reranker.gray.controller import Analysis
from reranker.gray.plan import Plan

SECURITY = "control_token"
MODELS: tuple[type, ...] = (
    Plan, Change, Weight, ReleaseView, ReleaseList, EventList, AssignmentView, Analysis, ProblemBody,
)  # fmt: skip
_PROBLEMS = {
    "400": "The body is not JSON, or there is no Idempotency-Key",
    "401": "The control token is missing or wrong",
    "404": "There is no such gray release",
    "409": "The gray release does not allow this now, is not ready, or the same change is being made",
    "412": "The gray release was changed since it was read",
    "422": "A field is not valid, or the Idempotency-Key belongs to another change",
    "428": "There is no If-Match",
    "503": "Redis does not answer",
}
_READ = ("401", "503")
_CREATE = ("400", "401", "409", "422", "503")
_CHANGE = (*_PROBLEMS,)


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    method: str
    summary: str
    reply: type
    problems: Sequence[str]
    body: type | None = None
    body_required: bool = True
    status: str = "200"
    query: str | None = None
    streams: bool = False


_ONE = "/v1/releases/{name}"
_ROUTES = (
    _Route("/v1/releases", "post", "Plan a gray release", ReleaseView, _CREATE, Plan, status="201"),
    _Route("/v1/releases", "get", "The gray release now", ReleaseList, _READ),
    _Route(_ONE, "get", "One gray release", ReleaseView, (*_READ, "404")),
    _Route(_ONE, "patch", "Set the weight by hand", ReleaseView, _CHANGE, Weight),
    *(
        _Route(f"{_ONE}:{action}", "post", said, ReleaseView, _CHANGE, Change, body_required=False)
        for action, said in ACTIONS.items()
    ),
    _Route(f"{_ONE}/analysis", "get", "The newest verdict of every gate; null before the first", Analysis,
           (*_READ, "404")),
    _Route(f"{_ONE}/events", "get", "Audit log; as server-sent events when asked so", EventList, (*_READ, "404"),
           streams=True),
    _Route(f"{_ONE}/assignment", "get", "Which arm a user has, and why", AssignmentView, (*_READ, "404", "422"),
           query="user_id"),
)  # fmt: skip


def describe_releases(document: dict[str, Any], ref: Mapping[type, Any]) -> None:
    """Add the routes to an OpenAPI document; `ref` are the schemas of MODELS."""
    schemes = document["components"].setdefault("securitySchemes", {})
    schemes[SECURITY] = {"type": "http", "scheme": "bearer"}
    for route in _ROUTES:
        document["paths"].setdefault(route.path, {})[route.method] = _operation(route, ref)


def _operation(route: _Route, ref: Mapping[type, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "security": [{SECURITY: []}],
        "parameters": _parameters(route),
        "responses": {route.status: _reply(route, ref)},
    }
    if route.body is not None:
        content = {"application/json": {"schema": ref[route.body]}}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    for status in route.problems:
        content = {"application/problem+json": {"schema": ref[ProblemBody]}}
        operation["responses"][status] = {"description": _PROBLEMS[status], "content": content}
    return operation


def _reply(route: _Route, ref: Mapping[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": ref[route.reply]}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    reply: dict[str, Any] = {"description": route.summary, "content": content}
    if route.reply is ReleaseView:
        reply["headers"] = {"ETag": {"description": "What If-Match takes", "schema": {"type": "string"}}}
    return reply


def _parameters(route: _Route) -> list[dict[str, Any]]:
    found = []
    if "{name}" in route.path:
        found.append(_parameter("name", "path", "Name of the gray release"))
    if route.query is not None:
        found.append(_parameter(route.query, "query", "A user"))
    if route.method != "get":
        found.append(_parameter("Idempotency-Key", "header", "Any text; the same call again is the same change"))
        found.append(_parameter("X-Operator", "header", "Who, for the audit log", required=False))
        if route.path != "/v1/releases":
            found.append(_parameter("If-Match", "header", "The ETag of what was read, or *"))
    return found


def _parameter(name: str, where: str, said: str, *, required: bool = True) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "description": said, "schema": {"type": "string"}}
