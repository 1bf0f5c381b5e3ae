"""What an answer is made of when stages are missing, and how long a stage may take. Pure.

The order is the reranker's, then the edge ranker's, then recall's, then popularity: whatever was scored last and
deepest comes first, and a place keeps the name of the stage that gave it. Ties keep the order of the candidates, so
the same request has the same answer. Invariant: a score that is not finite never wins a place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.deadline import Deadline
from reranker.gateway.schemas import Stage

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

# By which share of the deadline a stage must be over, so that the later ones still have theirs. A fast stage leaves
# what it did not use to the next.
LATEST_SHARE: Mapping[str, float] = {"features": 0.7, "embeddings": 0.82, "edge": 0.92, "rerank": 1.0}
# Kept back for the reply itself: selecting, encoding, writing.
REPLY_RESERVE_S = 0.003
REPLY_RESERVE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of one request: it began at `start_s` (monotonic) and has `total_s`."""

    start_s: float
    total_s: float

    def deadline(self, stage: str) -> Deadline:
        """When this stage must be over."""
        usable_s = self.total_s - min(REPLY_RESERVE_S, REPLY_RESERVE_SHARE * self.total_s)
        return Deadline(self.start_s + usable_s * LATEST_SHARE[stage])


class Place(NamedTuple):
    """One place of the answer: the number of the candidate, its logit, and the stage that put it there."""

    candidate: int
    logit: float
    stage: Stage


@dataclass(slots=True)
class Scores:
    """Logits of the stages that answered: `recall` and `edge` f32[N], `rerank` f32[n] of the candidates `chosen`."""

    recall: F32
    edge: F32 | None = None
    chosen: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    rerank: F32 | None = None


def usable(scores: F32, n: int) -> bool:
    """Whether a stage's reply counts: one finite score per candidate."""
    return scores.shape == (n,) and bool(np.isfinite(scores).all())


def best_first(scores: F32) -> I64:
    """Indices from the highest score down; ties in index order, NaN last."""
    return np.argsort(-scores, kind="stable")


def places(scores: Scores, k: int) -> list[Place]:
    """The first k places: the reranked ones, then the rest in edge order, or in recall order without an edge."""
    if scores.edge is None:
        return _take(best_first(scores.recall), scores.recall, "recall", k)
    if scores.rerank is None:
        return _take(best_first(scores.edge), scores.edge, "edge", k)
    order = best_first(scores.rerank)
    best = order[:k]
    found = [
        Place(i, s, "rerank") for i, s in zip(scores.chosen[best].tolist(), scores.rerank[best].tolist(), strict=True)
    ]
    if len(found) < k:
        rest = best_first(scores.edge)
        rest = rest[~np.isin(rest, scores.chosen)]
        found += _take(rest, scores.edge, "edge", k - len(found))
    return found


def explain(scores: Scores, indices: Sequence[int]) -> list[dict[str, tuple[float, int]]]:
    """(logit, rank from 1) of each given candidate in each stage that scored it."""
    stages = {"recall": _ranks(scores.recall)}
    if scores.edge is not None:
        stages["edge"] = _ranks(scores.edge)
    if scores.rerank is not None:
        within = _ranks(scores.rerank)
        stages["rerank"] = {int(index): within[i] for i, index in enumerate(scores.chosen)}
    return [{name: found[i] for name, found in stages.items() if i in found} for i in indices]


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1.0 + math.tanh(0.5 * logit))


def _ranks(scores: F32) -> dict[int, tuple[float, int]]:
    order = best_first(scores).tolist()
    return {i: (float(scores[i]), rank) for rank, i in enumerate(order, start=1)}


def _take(order: I64, scores: F32, stage: Stage, k: int) -> list[Place]:
    chosen = order[:k]
    return [Place(i, s, stage) for i, s in zip(chosen.tolist(), scores[chosen].tolist(), strict=True)]
