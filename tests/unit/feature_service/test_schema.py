"""The features' one definition."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_service.schema import (
    FeatureSchema,
    assemble,
    gap_indices,
    gap_keys,
    pool_categories,
    recall_query,
    schema_of,
    user_vector,
)
from infra.errors import ReleaseRefused

SCHEMA = FeatureSchema(n_user_buckets=10)
times = st.lists(st.integers(0, 10**15), min_size=1, max_size=50).map(lambda x: np.array(sorted(x), np.int64))


def _rows(n: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


@given(times, st.integers(-(10**14), 10**14))
def test_gaps_depend_on_ages_alone_and_grow_with_them(ts_us: np.ndarray, shift: int) -> None:
    gaps = gap_indices(SCHEMA, ts_us)
    assert (gaps == gap_indices(SCHEMA, ts_us + shift)).all()
    assert gaps[-1] == 1
    assert (np.diff(gaps) <= 0).all()
    assert set(gaps.tolist()) <= set(gap_keys(SCHEMA).tolist()) - {0}


@pytest.mark.parametrize(("age_s", "gap"), [(0, 1), (0.999999, 1), (1, 2), (30, 3), (2_592_000, 10), (1e9, 10)])
def test_a_gap_begins_at_its_bound(age_s: float, gap: int) -> None:
    newest = 2_000_000_000_000_000
    assert gap_indices(SCHEMA, np.array([newest - round(age_s * 1e6), newest]))[0] == gap


def test_the_gap_table_has_a_row_for_every_gap() -> None:
    assert gap_keys(SCHEMA).size == SCHEMA.n_gaps == len(SCHEMA.gap_bounds_s) + 2


def test_tokens_are_item_category_gap() -> None:
    history = (_rows(4, 32), _rows(4, 16, 1), _rows(4, 16, 2))
    target = (_rows(3, 32, 3), _rows(3, 16, 4))
    gap = _rows(1, 16, 5)[0]
    inputs = assemble(
        SCHEMA,
        user=_rows(1, 32)[0],
        history_items=history[0],
        history_categories=history[1],
        history_gaps=history[2],
        target_items=target[0],
        target_categories=target[1],
        target_gap=gap,
    )
    np.testing.assert_array_equal(inputs.hist, np.concatenate(history, axis=1))
    np.testing.assert_array_equal(inputs.target, np.concatenate((*target, np.tile(gap, (3, 1))), axis=1))
    assert inputs.mask.tolist() == [1.0] * 4
    assert inputs.only(np.array([2, 0])).target.tolist() == inputs.target[[2, 0]].tolist()


def test_an_empty_history_is_one_masked_token_of_zeros() -> None:
    inputs = assemble(
        SCHEMA,
        user=_rows(1, 32)[0],
        history_items=_rows(0, 32),
        history_categories=_rows(0, 16),
        history_gaps=_rows(0, 16),
        target_items=_rows(3, 32),
        target_categories=_rows(3, 16),
        target_gap=_rows(1, 16)[0],
    )
    assert inputs.hist.shape == (1, SCHEMA.token_dim)
    assert not inputs.hist.any()
    assert inputs.mask.tolist() == [0.0]


def test_the_user_vector_is_his_row_or_else_his_bucket_plus_mean_attributes() -> None:
    own, bucket, attributes = _rows(1, 32)[0], _rows(1, 32, 1)[0], _rows(3, 32, 2)
    np.testing.assert_allclose(user_vector(own, True, bucket, attributes), own + attributes.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(user_vector(own, False, bucket, attributes), bucket + attributes.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(user_vector(own, True, bucket, attributes[:0]), own)


def test_the_recall_query_adds_the_mean_history_row() -> None:
    user, history = _rows(1, 32)[0], _rows(5, 32, 1)
    np.testing.assert_allclose(recall_query(user, history), user + history.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(recall_query(user, history[:0]), user)


def test_categories_are_averaged_and_none_is_zero() -> None:
    rows = _rows(2, 16)
    pooled = pool_categories(rows, np.array([[0.5, 0.5], [0, 0]], np.float32))
    np.testing.assert_allclose(pooled[0], rows.mean(axis=0), rtol=1e-5)
    assert not pooled[1].any()


def test_the_fingerprint_changes_with_every_field() -> None:
    changed = [
        replace(SCHEMA, n_user_buckets=11),
        replace(SCHEMA, user_dim=33),
        replace(SCHEMA, item_dim=33),
        replace(SCHEMA, category_dim=17),
        replace(SCHEMA, gap_dim=17),
        replace(SCHEMA, max_history=51),
        replace(SCHEMA, gap_bounds_s=(1.0,)),
        replace(SCHEMA, history_events=("click",)),
        replace(SCHEMA, hash_name="other"),
        replace(SCHEMA, version=2),
    ]
    assert len(changed) == len(asdict(SCHEMA))
    assert len({s.fingerprint() for s in [SCHEMA, *changed]}) == len(changed) + 1


def test_a_schema_survives_its_own_manifest() -> None:
    assert schema_of(asdict(SCHEMA), SCHEMA.fingerprint()) == SCHEMA


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"hash_name": "md5"}, "md5"),
        ({"item_dim": 64}, "fingerprint"),
        ({"mood": 1}, "unknown field mood"),
        ({"item_dim": "wide"}, "item_dim"),
    ],
)
def test_a_schema_that_means_something_else_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ReleaseRefused, match=reason):
        schema_of({**asdict(SCHEMA), **change}, SCHEMA.fingerprint())
