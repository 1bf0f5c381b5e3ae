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
from feature_service.interactions import Histories
from feature_service.schema import FeatureSchema
from infra.errors import InvalidInput

I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

TEST_SHARE = 0.1
VALIDATION_SHARE = 0.05
MIN_TRAIN_EVENTS = 100
MIN_TRAIN_ITEMS = 2


@dataclass(frozen=True, slots=True)
class Occurring:
    """What occurs in a training period: events per item i64[n_items], and whether a user does, bool[n_users]."""

    items: I64
    users: BOOL


@dataclass(frozen=True, slots=True)
class Timeline:
    """A dataset and its cut. `train` i64[n] and `test` i64[m] are event numbers in ascending order. `occurring` is
    given where the dataset holds only some users of a larger log: the counts of all of it."""

    dataset: Dataset
    test_from_us: int
    train: I64
    test: I64
    occurring: Occurring | None = None

    def histories(self, schema: FeatureSchema, events: I64) -> Histories:
        """What preceded each of `events`."""
        return self.dataset.interactions.histories(schema, events)

    def item_counts(self) -> I64:
        """Training events per item, i64[n_items]."""
        if self.occurring is not None:
            return self.occurring.items
        return np.bincount(self.dataset.item[self.train], minlength=len(self.dataset.item_ids))

    def trained_users(self) -> BOOL:
        """Whether a user occurs in the training period, bool[n_users]."""
        if self.occurring is not None:
            return self.occurring.users
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
        raise too_few_events(dataset.name, timeline.train.size, dataset.n_events, test_share)
    if n_items < MIN_TRAIN_ITEMS:
        raise too_few_items(dataset.name, n_items)
    return timeline


def hold_out(timeline: Timeline, share: float = VALIDATION_SHARE) -> Timeline:
    """The training period alone, cut again: its newest `share` is validation, the part called `test` in the result."""
    data, known = timeline.dataset, timeline.train
    ts_us = data.ts_us[known]
    from_us = int(np.sort(ts_us)[int(known.size * (1 - share))])
    return Timeline(data, from_us, known[ts_us < from_us], known[ts_us >= from_us])


def too_few_events(name: str, n_train: int, n_events: int, test_share: float) -> InvalidInput:
    """The refusal of a log with so few training events."""
    return InvalidInput(
        name,
        f"too little to train on: {n_train} of {n_events} events lie before the last "
        f"{test_share:.0%} in time; at least {MIN_TRAIN_EVENTS} are needed",
    )


def too_few_items(name: str, n_items: int) -> InvalidInput:
    """The refusal of a log with so few trained items."""
    return InvalidInput(name, f"too little to train on: {n_items} item; at least {MIN_TRAIN_ITEMS} are needed")
