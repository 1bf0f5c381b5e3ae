"""Interactions in the order of user, then time, and the history that preceded each.

The whole log in memory, or the part of a log that is read at a time: both are this. Refuses nothing. Invariant: the
history of an event is what the same user did before it, however much of the log is here, as long as that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_service.schema import CANDIDATE_GAP, FeatureSchema

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Histories:
    """For B events: item row numbers i64[B, L] (0 where masked), gaps i64[B, L], mask f32[B, L]; oldest first, real
    ones at the end."""

    items: I64
    gaps: I64
    mask: F32


@dataclass(frozen=True, slots=True)
class Interactions:
    """`user` and `item` int[n] are row numbers, `ts_us` i64[n] times in microseconds since 1970, all different within
    a user. `first` i64[n_users + 1]: interactions of user u are first[u]..first[u + 1]."""

    user: Ints
    item: Ints
    ts_us: I64
    first: I64

    def n_before(self, events: I64) -> I64:
        """Events of the same user before each of `events`, i64[B]."""
        return events - self.first[self.user[events]]

    def histories(self, schema: FeatureSchema, events: I64) -> Histories:
        """What preceded each of `events`; the same gaps as `schema.gap_indices` gives for one history."""
        steps = np.arange(-schema.max_history, 0)
        rows = events[:, None] + steps
        real = steps >= -self.n_before(events)[:, None]
        rows = np.where(real, rows, 0)
        newest = self.ts_us[np.maximum(events - 1, 0)]
        age_s = (newest[:, None] - self.ts_us[rows]) / 1e6
        gaps = np.searchsorted(np.asarray(schema.gap_bounds_s), age_s, side="right") + 1
        items = self.item[rows].astype(np.int64, copy=False)
        return Histories(np.where(real, items, 0), np.where(real, gaps, CANDIDATE_GAP), real.astype(np.float32))
