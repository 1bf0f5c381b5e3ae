"""What comes in and goes out over HTTP, as msgspec structs; and the one place where a body becomes a request.

Refuses unknown fields, wrong types, NaN and infinities, and everything out of range, naming the field. Ids are
strings or integers and are strings from here on: `196` and `"196"` are the same.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from reranker.gateway.problems import Problem, invalid
from reranker.gray.bodies import Change, Weight
from reranker.gray.plan import Plan

MAX_ID_BYTES = 256
MAX_CANDIDATES = 2000
MAX_K = 500
MAX_EVENTS = 1000
MAX_DEADLINE_MS = 60_000.0
MIN_DEADLINE_MS = 1.0

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES, description="At most 256 bytes of UTF-8.")] | int
Label = Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES)]
Stage = Literal["rerank", "edge", "recall", "popular"]
UserKind = Literal["known", "bucket", "anonymous"]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What recommend and rank have in common."""

    user_id: Id | None = None
    request_id: Label | None = None
    session_id: Label | None = None
    k: Annotated[int, Meta(ge=1, le=MAX_K)] = 20
    exclude: Annotated[list[Id], Meta(max_length=MAX_CANDIDATES)] = []
    context: dict[str, Any] = {}
    deadline_ms: Annotated[float, Meta(ge=MIN_DEADLINE_MS, le=MAX_DEADLINE_MS)] | None = None
    explain: bool = False


class RecommendRequest(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/recommend`."""

    candidates: Annotated[list[Id], Meta(max_length=MAX_CANDIDATES)] | None = None


class RankRequest(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/rank`."""

    candidates: Annotated[list[Id], Meta(max_length=MAX_CANDIDATES)]


class FeedbackItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One event; `ts` is in seconds since 1970-01-01 UTC, now when left out."""

    user_id: Id
    item_id: Id
    event: Label
    ts: Annotated[float, Meta(ge=0)] | None = None
    recommendation_id: Label | None = None


class FeedbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/feedback`."""

    events: Annotated[list[FeedbackItem], Meta(min_length=1, max_length=MAX_EVENTS)]


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Score and rank of one item in one stage."""

    score: float
    rank: int


class RankedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place of the answer. `title`, `stages` and `found` come with `explain`."""

    item_id: str
    score: float
    rank: int
    stage: Stage
    title: str | UnsetType = UNSET
    categories: list[str] | UnsetType = UNSET
    stages: dict[str, Explanation] | UnsetType = UNSET


class ReleaseBlock(msgspec.Struct, frozen=True):
    """Which release answered, and why."""

    id: str
    arm: Literal["stable", "candidate"]
    bucket_ppm: int
    reason: str


class Versions(msgspec.Struct, frozen=True):
    """What exactly answered; `watermark_ms` is the event time up to which the stream of updates is in the rows. The
    engines that ran the rankers (`kind:precision`) are there for each stage that gave scores."""

    edge: str
    rerank: str
    generation: int
    schema: str
    watermark_ms: int
    edge_engine: str | UnsetType = UNSET
    rerank_engine: str | UnsetType = UNSET


class Degraded(msgspec.Struct, frozen=True):
    """Which stages are missing in this answer."""

    value: bool
    reasons: list[str]


class CoverageBlock(msgspec.Struct, frozen=True):
    """What was found. `missing_ids` names at most 100 candidates without a row; `missing` counts them all."""

    candidates: int
    scored: int
    features_found: int
    missing: int
    missing_ids: list[str]
    user: UserKind


class RecommendReply(msgspec.Struct, frozen=True):
    """Body of the answer to recommend and rank."""

    recommendation_id: str
    request_id: str
    items: list[RankedItem]
    release: ReleaseBlock
    versions: Versions
    degraded: Degraded
    coverage: CoverageBlock
    timing_ms: dict[str, float]


class FeedbackReply(msgspec.Struct, frozen=True):
    """Body of the answer to feedback, sent when the log has every event."""

    accepted: int


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of every error (RFC 9457); `field` names what is wrong in the request."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None


T = TypeVar("T", RecommendRequest, RankRequest, FeedbackRequest, Plan, Change, Weight)

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (RecommendRequest, RankRequest, FeedbackRequest, Plan, Change, Weight)
}
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


def parse(body: bytes, kind: type[T]) -> T:
    """The request in `body`. Raises Problem: 400 for what is no JSON, 422 naming the field for what is not valid."""
    try:
        return _DECODERS[kind].decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if field := _not_finite_field(body):
            raise invalid(field, "NaN and infinities are not numbers here") from error
        raise Problem("malformed-json", str(error) or "nested too deeply") from error


def text_id(raw: str | int, field: str) -> str:
    """The id as a string. Raises Problem when it has more than 256 bytes."""
    text = raw if isinstance(raw, str) else str(raw)
    if len(text) > MAX_ID_BYTES or (not text.isascii() and len(text.encode()) > MAX_ID_BYTES):
        raise invalid(field, f"Expected an id of at most {MAX_ID_BYTES} bytes")
    return text


def text_ids(raws: list[str | int], field: str) -> list[str]:
    """Many ids as strings. Raises Problem naming the first one that is too long."""
    texts = [raw if raw.__class__ is str else str(raw) for raw in raws]
    if not "".join(texts).isascii() or max(map(len, texts), default=0) > MAX_ID_BYTES:
        for i, text in enumerate(texts):
            text_id(text, f"{field}[{i}]")
    return texts


def _invalid(message: str) -> Problem:
    path = _PATH.search(message)
    detail = message[: path.start()] if path else message
    field = path.group(1) if path else ""
    if inner := _UNKNOWN.search(detail) or _MISSING.search(detail):
        field = f"{field}.{inner.group(1)}" if field else inner.group(1)
    return invalid(field or "$", detail)


def _not_finite_field(body: bytes) -> str | None:
    """Path of the first NaN or infinity in `body`, when those are all that keeps it from being JSON."""
    marker = object()
    try:
        parsed = json.loads(body, parse_constant=lambda _: marker)
    except (ValueError, RecursionError):
        return None
    return _path_of(parsed, marker, "")


def _path_of(value: object, marker: object, path: str) -> str | None:
    if value is marker:
        return path or "$"
    if isinstance(value, dict):
        inner = ((v, f"{path}.{k}" if path else k) for k, v in value.items())
    elif isinstance(value, list):
        inner = ((v, f"{path}[{i}]") for i, v in enumerate(value))
    else:
        return None
    return next((found for v, p in inner if (found := _path_of(v, marker, p))), None)
