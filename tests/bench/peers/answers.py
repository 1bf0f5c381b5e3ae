"""Request and reply of the peers, as FastAPI's documentation recommends: Pydantic models, the reply declared as the
endpoint's return type, so that Pydantic's compiled serialiser writes it. The fields are those of the product's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from infra.release import EDGE_MODEL, RERANK_MODEL, Manifest

Id = Annotated[str, Field(min_length=1, max_length=256)] | int
UserKind = Literal["known", "bucket", "anonymous"]


class Ask(BaseModel):
    """Body of `POST /v1/recommend`, without given candidates: the benchmark sends none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_id: Id | None = None
    request_id: str | None = None
    session_id: str | None = None
    k: Annotated[int, Field(ge=1, le=500)] = 20
    context: dict[str, Any] = {}
    deadline_ms: Annotated[float, Field(ge=1, le=60000)] | None = None


class Placed(BaseModel):
    """One place of the answer."""

    item_id: str
    score: float
    rank: int
    stage: Literal["rerank"] = "rerank"


class ReleaseBlock(BaseModel):
    """Which release answered."""

    id: str
    arm: Literal["stable"] = "stable"
    bucket_ppm: int = 0
    reason: str = "split"


class Versions(BaseModel):
    """What exactly answered."""

    edge: str
    rerank: str
    generation: int
    schema_: str = Field(serialization_alias="schema")
    watermark_ms: int = 0


class Degraded(BaseModel):
    """Which stages are missing; the peers have no way to answer without one."""

    value: bool = False
    reasons: list[str] = []


class Coverage(BaseModel):
    """What was found."""

    candidates: int
    scored: int
    features_found: int
    missing: int = 0
    missing_ids: list[str] = []
    user: UserKind


class Answer(BaseModel):
    """Body of the reply."""

    recommendation_id: str
    request_id: str
    items: list[Placed]
    release: ReleaseBlock
    versions: Versions
    degraded: Degraded
    coverage: Coverage
    timing_ms: dict[str, float]


class Answers:
    """Makes replies; what does not change between them is made once."""

    def __init__(self, manifest: Manifest, ids: Sequence[str]) -> None:
        self._ids = ids
        self._release = ReleaseBlock(id=manifest.name)
        self._versions = Versions(
            edge=manifest.files[EDGE_MODEL][:12],
            rerank=manifest.files[RERANK_MODEL][:12],
            generation=manifest.generation,
            schema_=manifest.schema_fingerprint,
        )
        self._degraded = Degraded()

    def make(
        self,
        ask: Ask,
        items: NDArray[np.int64],
        logits: NDArray[np.float32],
        *,
        n_candidates: int,
        user: UserKind,
        stopwatch: Stopwatch,
    ) -> Answer:
        """The reply that places these items, best first, with the sigmoid of their logits as scores."""
        scores = (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).tolist()
        recommendation_id = uuid.uuid4().hex
        placed = [
            Placed(item_id=self._ids[item], score=score, rank=rank)
            for rank, (item, score) in enumerate(zip(items.tolist(), scores, strict=True), start=1)
        ]
        return Answer(
            recommendation_id=recommendation_id,
            request_id=ask.request_id or recommendation_id,
            items=placed,
            release=self._release,
            versions=self._versions,
            degraded=self._degraded,
            coverage=Coverage(candidates=n_candidates, scored=n_candidates, features_found=n_candidates, user=user),
            timing_ms=stopwatch.total(),
        )


class Stopwatch:
    """Milliseconds of each stage of one request."""

    def __init__(self) -> None:
        self._start_s = self._last_s = time.perf_counter()
        self.timing_ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """The stage that ends here."""
        now_s = time.perf_counter()
        self.timing_ms[stage] = round((now_s - self._last_s) * 1e3, 3)
        self._last_s = now_s

    def total(self) -> dict[str, float]:
        """All stages and the whole."""
        self.timing_ms["total"] = round((time.perf_counter() - self._start_s) * 1e3, 3)
        return self.timing_ms
