"""Whether a logit means what it says: predicted against observed shares. Pure numpy.

Source of the measure: Naeini, Cooper, Hauskrecht, "Obtaining Well Calibrated Probabilities Using Bayesian Binning"
(AAAI 2015), here with bins of equal weight, since nearly all predictions of a ranker are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BINS = 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """Per bin f64[BINS or fewer], in ascending order: mean prediction, observed share of taken ones, share of all
    weight. `error` is the expected calibration error: the mean distance between the first two."""

    predicted: F64
    observed: F64
    share: F64
    error: float

    def as_dict(self) -> dict[str, Any]:
        """For the report, rounded to 5 digits."""
        curve = {name: np.round(getattr(self, name), 5).tolist() for name in ("predicted", "observed", "share")}
        return {"error": round(self.error, 5), **curve}


def calibration(positive: F32, negatives: list[tuple[F32, float]], bins: int = BINS) -> Calibration:
    """Calibration of logits f32[R] of what was taken and f32[R, n] of what was not; each of the latter comes with the
    weight that the negatives of one request have together, the one that was taken weighing 1."""
    logits = np.concatenate([positive, *(scores.ravel() for scores, _ in negatives)]).astype(np.float64)
    weight = np.concatenate(
        [np.ones(positive.size), *(np.full(scores.size, together / scores.shape[1]) for scores, together in negatives)]
    )
    taken = np.zeros(logits.size)
    taken[: positive.size] = 1.0
    order = np.argsort(logits, kind="stable")
    predicted, weight, taken = 1 / (1 + np.exp(-logits[order])), weight[order], taken[order]
    middle = (np.cumsum(weight) - weight / 2) / weight.sum()
    number = np.minimum((middle * bins).astype(np.int64), bins - 1)
    total = np.bincount(number, weight, bins)
    filled = total > 0
    mean = np.bincount(number, weight * predicted, bins)[filled] / total[filled]
    observed = np.bincount(number, weight * taken, bins)[filled] / total[filled]
    share = total[filled] / total.sum()
    return Calibration(mean, observed, share, float((share * np.abs(mean - observed)).sum()))
