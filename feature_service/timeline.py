"""The log over time: what is trained on, what is tested on, and the history each event was preceded by.

One cut in time for everybody. What lies at or after it is the test period: no count, no row, no negative and no
history of a training event knows of it. A test event's history is what the user did before that event, which is
what serving would have had. Refuses a log too short to train on or without a test period.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_service.dataset import Dataset
from feature_service.schema import CANDIDATE_GAP, FeatureSchema
from infra.errors import InvalidInput

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

TEST_SHARE = 0.1
VALIDATION_SHARE = 0.05
MIN_TRAIN_EVENTS = 100
MIN_TRAIN_ITEMS = 2


@dataclass(frozen=True, slots=True)
class Histories:
    """For B events: item row numbers i64[B, L] (0 where masked), gaps i64[B, L], mask f32[B, L]; oldest first, real
    ones at the end."""

    items: I64
    gaps: I64
    mask: F32


@dataclass(frozen=True, slots=True)
class Timeline:
    """A dataset and its cut. `train` i64[n] and `test` i64[m] are event numbers in ascending order."""

    dataset: Dataset
    test_from_us: int
    train: I64
    test: I64

    def n_before(self, events: I64) -> I64:
        """Events of the same user before each of `events`, i64[B]."""
        return events - self.dataset.first[self.dataset.user[events]]

    def histories(self, schema: FeatureSchema, events: I64) -> Histories:
        """What preceded each of `events`; the same gaps as `schema.gap_indices` gives for one history."""
        data, length = self.dataset, schema.max_history
        steps = np.arange(-length, 0)
        rows = events[:, None] + steps
        real = steps >= -self.n_before(events)[:, None]
        rows = np.where(real, rows, 0)
        newest = data.ts_us[np.maximum(events - 1, 0)]
        age_s = (newest[:, None] - data.ts_us[rows]) / 1e6
        gaps = np.searchsorted(np.asarray(schema.gap_bounds_s), age_s, side="right") + 1
        return Histories(
            np.where(real, data.item[rows], 0), np.where(real, gaps, CANDIDATE_GAP), real.astype(np.float32)
        )

    def item_counts(self) -> I64:
        """Training events per item, i64[n_items]."""
        return np.bincount(self.dataset.item[self.train], minlength=len(self.dataset.item_ids))

    def trained_users(self) -> BOOL:
        """Whether a user occurs in the training period, bool[n_users]."""
        return np.bincount(self.dataset.user[self.train], minlength=len(self.dataset.user_ids)) > 0


def cut(dataset: Dataset, test_share: float = TEST_SHARE) -> Timeline:
    """Cut so that about `test_share` of the events lie in the test period. Raises InvalidInput."""
    if dataset.n_events == 0:
        raise InvalidInput(dataset.name, "no event but impressions; there is nothing to learn from")
    in_time = np.sort(dataset.ts_us)
    test_from_us = int(in_time[int(dataset.n_events * (1 - test_share))])
    is_test = dataset.ts_us >= test_from_us
    timeline = Timeline(dataset, test_from_us, np.flatnonzero(~is_test), np.flatnonzero(is_test))
    n_items = int((timeline.item_counts() > 0).sum())
    if timeline.train.size < MIN_TRAIN_EVENTS:
        raise InvalidInput(
            dataset.name,
            f"too little to train on: {timeline.train.size} of {dataset.n_events} events lie before the last "
            f"{test_share:.0%} in time; at least {MIN_TRAIN_EVENTS} are needed",
        )
    if n_items < MIN_TRAIN_ITEMS:
        raise InvalidInput(
            dataset.name, f"too little to train on: {n_items} item; at least {MIN_TRAIN_ITEMS} are needed"
        )
    return timeline


def hold_out(timeline: Timeline, share: float = VALIDATION_SHARE) -> Timeline:
    """The training period alone, cut again: its newest `share` is validation, the part called `test` in the result."""
    data, known = timeline.dataset, timeline.train
    ts_us = data.ts_us[known]
    from_us = int(np.sort(ts_us)[int(known.size * (1 - share))])
    return Timeline(data, from_us, known[ts_us < from_us], known[ts_us >= from_us])
