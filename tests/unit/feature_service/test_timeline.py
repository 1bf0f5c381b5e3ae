"""The cut in time: nothing of the test period reaches training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_service.dataset import Dataset, make_dataset
from feature_service.schema import FeatureSchema, gap_indices
from feature_service.timeline import cut, hold_out
from infra.errors import InvalidInput
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=5)
seeds = st.integers(0, 1000)


def _without(dataset: Dataset, keep: np.ndarray) -> Dataset:
    return make_dataset(
        dataset.name,
        users=[dataset.user_ids[u] for u in dataset.user[keep]],
        items=[dataset.item_ids[i] for i in dataset.item[keep]],
        ts_us=dataset.ts_us[keep],
        events=["click"] * int(keep.sum()),
        facts={},
        attributes={},
        fingerprint="",
    )


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_every_training_event_lies_before_every_test_event(seed: int) -> None:
    timeline = cut(small_dataset(seed=seed))
    ts_us = timeline.dataset.ts_us
    assert ts_us[timeline.train].max() < timeline.test_from_us <= ts_us[timeline.test].min()
    assert np.array_equal(np.sort(np.concatenate((timeline.train, timeline.test))), np.arange(ts_us.size))
    assert 0.05 <= timeline.test.size / ts_us.size <= 0.15


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_training_is_the_same_when_the_test_period_never_happened(seed: int) -> None:
    timeline = cut(small_dataset(seed=seed))
    data = timeline.dataset
    before = _without(data, data.ts_us < timeline.test_from_us)
    names = [(data.user_ids[data.user[e]], data.item_ids[data.item[e]], data.ts_us[e]) for e in timeline.train]
    alone = [
        (before.user_ids[u], before.item_ids[i], t)
        for u, i, t in zip(before.user, before.item, before.ts_us, strict=True)
    ]
    assert sorted(names) == sorted(alone)
    histories = timeline.histories(SCHEMA, timeline.train)
    touched_before = {(data.user[e], data.item[e]) for e in timeline.train.tolist()}
    users = data.user[timeline.train]
    rows, columns = np.nonzero(histories.mask)
    assert all((users[r], histories.items[r, c]) in touched_before for r, c in zip(rows, columns, strict=True))
    counts = dict(zip(data.item_ids, timeline.item_counts().tolist(), strict=True))
    for i, item in enumerate(before.item_ids):
        assert counts[item] == (before.item == i).sum()


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_a_history_is_what_the_user_did_before_the_event_newest_last(seed: int) -> None:
    timeline = cut(small_dataset(seed=seed))
    data = timeline.dataset
    events = np.concatenate((timeline.train[::7], timeline.test))
    histories = timeline.histories(SCHEMA, events)
    for row, event in enumerate(events.tolist()):
        past = np.flatnonzero((data.user == data.user[event]) & (data.ts_us < data.ts_us[event]))[-SCHEMA.max_history :]
        real = histories.mask[row] > 0
        assert histories.items[row][real].tolist() == data.item[past].tolist()
        assert histories.gaps[row][real].tolist() == gap_indices(SCHEMA, data.ts_us[past]).tolist()
        assert not histories.items[row][~real].any()
        assert not histories.gaps[row][~real].any()


def test_validation_is_the_newest_part_of_the_training_period_alone() -> None:
    timeline = cut(small_dataset())
    held = hold_out(timeline)
    ts_us = timeline.dataset.ts_us
    assert np.array_equal(np.sort(np.concatenate((held.train, held.test))), timeline.train)
    assert ts_us[held.train].max() < ts_us[held.test].min()
    assert ts_us[held.test].max() < timeline.test_from_us


def test_too_little_to_train_on_is_said_with_the_numbers() -> None:
    with pytest.raises(InvalidInput, match=r"90 of 100 events .* at least 100 are needed"):
        cut(small_dataset(n_events=100))


def test_one_item_is_too_little() -> None:
    data = make_dataset(
        "one",
        users=["a"] * 300,
        items=["x"] * 300,
        ts_us=np.arange(300) * 10**6,
        events=["click"] * 300,
        facts={},
        attributes={},
        fingerprint="",
    )
    with pytest.raises(InvalidInput, match="1 item"):
        cut(data)


def test_a_log_of_one_moment_has_no_training_period() -> None:
    data = make_dataset(
        "flat",
        users=[f"u{n}" for n in range(300)],
        items=["x", "y"] * 150,
        ts_us=np.full(300, 10**15),
        events=["click"] * 300,
        facts={},
        attributes={},
        fingerprint="",
    )
    with pytest.raises(InvalidInput, match="too little to train on: 0 of 300"):
        cut(data)


def test_a_log_of_impressions_is_nothing_to_learn_from() -> None:
    data = make_dataset(
        "shown",
        users=["a"] * 300,
        items=["x"] * 300,
        ts_us=np.arange(300),
        events=["impression"] * 300,
        facts={},
        attributes={},
        fingerprint="",
    )
    with pytest.raises(InvalidInput, match="impressions"):
        cut(data)
