"""A log of interactions in order, whatever order it came in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_service.dataset import Dataset, ItemFacts, make_dataset
from feature_service.load import load_dataset
from infra.errors import InvalidInput

events = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=60)


def _dataset(rows: list[tuple[int, int, int]]) -> Dataset:
    return make_dataset(
        "d",
        users=[f"u{u}" for u, _, _ in rows],
        items=[f"i{i}" for _, i, _ in rows],
        ts_us=np.array([t for _, _, t in rows]) * 1_000_000,
        events=["click"] * len(rows),
        facts={},
        attributes={},
        fingerprint="",
    )


@given(events)
def test_events_are_sorted_by_user_and_time_and_ties_keep_their_order(rows: list[tuple[int, int, int]]) -> None:
    data = _dataset(rows)
    for u, user_id in enumerate(data.user_ids):
        own = slice(data.first[u], data.first[u + 1])
        expected = sorted(((t, n, i) for n, (user, i, t) in enumerate(rows) if f"u{user}" == user_id))
        assert (data.user[own] == u).all()
        assert [data.item_ids[i] for i in data.item[own]] == [f"i{i}" for _, _, i in expected]
        assert (np.diff(data.ts_us[own]) > 0).all()
        moved = data.ts_us[own] - np.array([t for t, _, _ in expected]) * 1_000_000
        assert ((moved >= 0) & (moved < len(rows))).all()


def test_impressions_are_no_events_but_their_ids_are_known() -> None:
    data = make_dataset(
        "d",
        users=["a", "b"],
        items=["x", "y"],
        ts_us=np.array([1, 2]),
        events=["click", "impression"],
        facts={},
        attributes={},
        fingerprint="",
    )
    assert data.n_events == 1
    assert data.events == ("click",)
    assert data.user_ids == ["a", "b"]


def test_items_and_users_that_are_only_described_are_kept() -> None:
    data = make_dataset(
        "d",
        users=["a"],
        items=["x"],
        ts_us=np.array([1]),
        events=["click"],
        facts={"z": ItemFacts("Zed", ("k",))},
        attributes={"b": {"sex": "F"}},
        fingerprint="",
    )
    assert data.item_ids == ["x", "z"]
    assert data.facts == [ItemFacts(), ItemFacts("Zed", ("k",))]
    assert data.attributes == [{}, {"sex": "F"}]
    assert data.first.tolist() == [0, 1, 1]


def test_a_name_that_is_neither_a_folder_nor_a_known_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"data: there is no folder .*nowhere; give one, or movielens-100k"):
        load_dataset(str(tmp_path / "nowhere"), tmp_path)
