"""Counts of keys that nobody holds: never too small, rarely too great, forgotten in time."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.sketch import CountingSketch

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20), max_size=300)


@settings(deadline=None)
@given(keys=KEYS)
def test_a_count_is_never_less_than_the_truth(keys: list[int]) -> None:
    sketch = CountingSketch(1000)
    sketch.add(np.array(keys, np.int64))
    truth = Counter(keys)
    counts = sketch.estimate(np.array(list(truth), np.int64))
    assert all(count >= min(255, n) for count, n in zip(counts.tolist(), truth.values(), strict=True))


@settings(deadline=None)
@given(keys=KEYS)
def test_adding_returns_what_an_estimate_would_say_after_each(keys: list[int]) -> None:
    together, alone = CountingSketch(1000), CountingSketch(1000)
    counts = together.add(np.array(keys, np.int64)).tolist()
    assert counts == [int(alone.add(np.array([key], np.int64))[0]) for key in keys]


def test_with_room_for_its_keys_hardly_any_count_is_too_great() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 10_000)
    sketch = CountingSketch(10_000)
    for _ in range(5):
        sketch.add(keys)
    assert float((sketch.estimate(keys) > 5).mean()) < 0.02
    assert float((sketch.estimate(keys + 1) > 0).mean()) < 0.05


def test_a_count_ends_at_255() -> None:
    sketch = CountingSketch(1000)
    sketch.add(np.full(300, 7, np.int64))
    assert sketch.estimate(np.array([7])).tolist() == [255]


def test_counts_are_halved_after_ten_additions_per_key() -> None:
    sketch = CountingSketch(100)
    sketch.add(np.full(100, 7, np.int64))
    sketch.add(np.arange(100, 999))
    assert sketch.estimate(np.array([7])).tolist() == [100]
    sketch.add(np.array([1000]))
    assert sketch.estimate(np.array([7])).tolist() == [50]


def test_raising_never_lowers() -> None:
    sketch = CountingSketch(100)
    keys = np.array([1, 2])
    sketch.add(np.array([1, 1, 1]))
    sketch.raise_to(keys, np.array([2, 9], np.uint8))
    assert sketch.estimate(keys).tolist() == [3, 9]


def test_it_takes_eight_bytes_a_key_and_less_than_twice_that() -> None:
    assert 8 <= CountingSketch(1_000_000).bytes / 1_000_000 < 17
