"""Whether an engine scores the recorded requests as they were recorded. Pure.

Recorded are the logits of the FP32 model. FP32 has to give them again to rounding. Lower precisions differ by design:
their error is compared with the spread of the recorded logits, so that the limit means the same for every model, and
what they may cost in quality was decided when the release was made. Refuses scores that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# Largest difference of one logit, over the largest logit where that is above 1: float32 summed in another order.
LARGEST_FP32 = 1e-3
# Root mean square error over the standard deviation of the recorded logits. On MovieLens-100K the deviation is 2.5 to
# 2.8, and the error of FP16 0.0004 of it, of INT8 0.011 (edge) and 0.019 (BST); a wrong kernel is far above.
LARGEST_RMSE = {"fp16": 0.02, "int8": 0.15}


def disagreement(recorded: Sequence[F32], served: Sequence[F32], precision: str) -> str | None:
    """What is wrong with `served` (one array of logits per request), or None."""
    expected, got = np.concatenate(recorded), np.concatenate(served)
    if expected.size == 0:
        return None
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} of {got.size} scores are not finite"
    difference = np.abs(got - expected)
    if precision == "fp32":
        largest = float(difference.max()) / max(1.0, float(np.abs(expected).max()))
        if largest <= LARGEST_FP32:
            return None
        return f"scores differ from the recorded ones by up to {largest:.2g} of the largest, more than {LARGEST_FP32}"
    spread = max(float(expected.std()), 1e-3)
    error = float(np.sqrt(np.mean(np.square(difference, dtype=np.float64)))) / spread
    if error <= LARGEST_RMSE[precision]:
        return None
    return (
        f"scores differ from the recorded ones by {error:.1%} of their spread, more than {LARGEST_RMSE[precision]:.0%}"
    )
