"""How good a ranking is: AUC, AUC per request, NDCG@10, log-loss. Pure numpy.

One row per request: the item that was taken, against n items that were not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

NDCG_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Quality:
    """`auc` over all pairs of any two requests, `gauc` within requests, both with ties counted half; `log_loss` with
    the negatives of a request weighing `log_loss_negatives` together (None where scores are no logits)."""

    auc: float
    gauc: float
    ndcg_at_10: float
    log_loss: float | None

    def as_dict(self) -> dict[str, float | None]:
        """For the report, rounded to 5 digits."""
        return {name: None if value is None else round(value, 5) for name, value in asdict(self).items()}


def measure(positive: F32, negative: F32, log_loss_negatives: float | None = None) -> Quality:
    """Quality of the scores positive f32[R] and negative f32[R, n]."""
    return Quality(
        auc=auc(positive, negative.ravel()),
        gauc=float((_wins(positive, negative) / negative.shape[1]).mean()),
        ndcg_at_10=ndcg(positive, negative),
        log_loss=None if log_loss_negatives is None else log_loss(positive, negative, log_loss_negatives),
    )


def auc(positive: F32, negative: F32) -> float:
    """Chance that a positive [P] scores above a negative [N], ties half (Mann-Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    up_to = np.searchsorted(ordered, positive, side="right")
    return float((below + up_to).mean() / (2 * negative.size))


def ndcg(positive: F32, negative: F32) -> float:
    """NDCG@10 with one relevant item per request; among equals it stands last."""
    rank = (negative >= positive[:, None]).sum(axis=1)
    gain = np.where(rank < NDCG_DEPTH, 1 / np.log2(rank + 2.0), 0.0)
    return float(gain.mean())


def log_loss(positive: F32, negative: F32, negatives: float) -> float:
    """Mean cross-entropy of logits at the ratio of one positive to `negatives` negatives."""
    taken = np.logaddexp(0, -positive.astype(np.float64)).mean()
    left = np.logaddexp(0, negative.astype(np.float64)).mean()
    return float((taken + negatives * left) / (1 + negatives))


def _wins(positive: F32, negative: F32) -> F64:
    above = (positive[:, None] > negative).sum(axis=1)
    equal = (positive[:, None] == negative).sum(axis=1)
    wins: F64 = above + 0.5 * equal
    return wins
