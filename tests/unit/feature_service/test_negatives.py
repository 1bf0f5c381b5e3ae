"""Negatives: never the user's own, and distributed as said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_service.negatives import KINDS, Kind, Negatives


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 120), st.integers(0, 2**31), st.sampled_from(KINDS))
def test_no_drawn_item_is_the_users_own_however_few_are_left(n_items: int, n: int, seed: int, kind: Kind) -> None:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 5, n), rng.integers(0, n_items, n)
    counts = np.bincount(item, minlength=n_items)
    negatives = Negatives(counts, user, item)
    drawn, valid = negatives.draw(rng, np.arange(5), 20, kind)
    own = set(zip(user.tolist(), item.tolist(), strict=True))
    for u in range(5):
        left = negatives.untouched(u)
        assert valid[u].all() == (left.size > 0)
        assert all((u, i) not in own and counts[i] > 0 for i in drawn[u][valid[u]].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_uniform_or_in_proportion_to_training_events(kind: Kind) -> None:
    counts = np.array([0, 10, 20, 70])
    negatives = Negatives(counts, np.array([9]), np.array([1]))
    drawn, _ = negatives.draw(np.random.default_rng(0), np.zeros(100, np.int64), 300, kind)
    share = np.bincount(drawn.ravel(), minlength=4) / drawn.size
    expected = [0, 1 / 3, 1 / 3, 1 / 3] if kind == "uniform" else [0, 0.1, 0.2, 0.7]
    np.testing.assert_allclose(share, expected, atol=0.02)
