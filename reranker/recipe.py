"""How a release is trained: every number and every switch of the fit, as one value.

Refuses nothing. Invariant: with the same recipe, seed and data, a machine computes the same release.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of the fit; chosen on the validation stretch of MovieLens-100K. `batch_size` is that of one part."""

    batch_size: int = 128
    learning_rate: float = 6e-3
    warm_up_share: float = 0.15
    weight_decay: float = 0.1
    negatives_per_kind: int = 2
    bucket_share: float = 0.5
    recall_weight: float = 1.0
    # About this many samples are seen, whatever the size of the log, within these bounds on the passes.
    samples: int = 340_000
    max_passes: int = 40

    def passes(self, n_events: int) -> int:
        """Passes over a training period of `n_events`."""
        return max(1, min(self.max_passes, round(self.samples / n_events)))
