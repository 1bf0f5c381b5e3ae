"""First values of rows depend on seed, table and key alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reranker.remote.initial import initial_rows

KEYS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 12345], np.int64)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.integers(0, 2**31))
def test_a_row_is_the_same_whoever_asks_and_beside_whom(keys: list[int], seed: int) -> None:
    together = initial_rows(np.array(keys, np.int64), 8, seed=seed, table_id=4, spread=0.1)
    alone = [initial_rows(np.array([key], np.int64), 8, seed=seed, table_id=4, spread=0.1)[0] for key in keys]
    np.testing.assert_array_equal(together, alone)
    assert np.isfinite(together).all()


def test_seed_table_and_key_each_give_other_rows() -> None:
    base = initial_rows(KEYS, 16, seed=7, table_id=4, spread=0.1)
    assert np.unique(base).size == base.size
    assert not np.isin(initial_rows(KEYS, 16, seed=8, table_id=4, spread=0.1), base).any()
    assert not np.isin(initial_rows(KEYS, 16, seed=7, table_id=5, spread=0.1), base).any()


def test_the_numbers_are_normal_with_the_spread_asked_for() -> None:
    rows = initial_rows(np.arange(20_000, dtype=np.int64), 8, seed=7, table_id=1, spread=0.01)
    np.testing.assert_allclose(rows.std(axis=0), 0.01, rtol=0.03)
    assert abs(rows.mean()) < 1e-4
    assert abs(np.mean((rows / 0.01) ** 4) - 3.0) < 0.15
    assert abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.03
