from __future__ import annotations

import numpy as np
import pytest

from feature_service.hashing import CATEGORY, key_of
from infra.release import Item
from reranker.gateway.catalogue import MAX_LEARNED, UNKNOWN, Catalogue


def item(key: int, categories: list[str], events: int = 1) -> Item:
    return Item(f"id{key}", key, f"Title {key}", categories, events)


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue([item(7, ["a", "b"], 9), item(-3, [], 4), item(5, ["b", "c", "b"], 0)])


def test_keys_have_row_numbers_and_strangers_have_none(catalogue: Catalogue) -> None:
    assert catalogue.rows(np.array([5, 8, 7], np.int64)).tolist() == [2, UNKNOWN, 0]
    assert catalogue.rows(np.empty(0, np.int64)).tolist() == []


def test_category_weights_are_shares_of_the_distinct_categories(catalogue: Catalogue) -> None:
    rows = np.array([0, 1, 2, UNKNOWN, 0])
    columns = np.arange(3)

    weights = catalogue.category_weights(rows, columns)

    assert catalogue.category_keys.tolist() == [key_of(CATEGORY, name) for name in "abc"]
    assert weights.tolist() == [[0.5, 0.5, 0], [0, 0, 0], [0, 0.5, 0.5], [0, 0, 0], [0.5, 0.5, 0]]
    assert weights.dtype == np.float32


def test_weights_of_only_the_needed_columns_are_the_same(catalogue: Catalogue) -> None:
    rows = np.array([2, 1])
    columns = catalogue.columns_of(rows)

    assert columns.tolist() == [1, 2]
    assert catalogue.category_weights(rows, columns).tolist() == [[0.5, 0.5], [0, 0]]
    assert catalogue.category_weights(np.array([1]), catalogue.columns_of(np.array([1]))).shape == (1, 0)


def test_a_learned_item_is_known_and_known_ones_stay_as_they_are(catalogue: Catalogue) -> None:
    columns = np.arange(catalogue.category_keys.size)

    catalogue.learn([item(7, ["other"]), item(100, ["c", "new"]), item(100, ["c"])])

    assert len(catalogue) == 4
    assert catalogue.rows(np.array([7, 100], np.int64)).tolist() == [0, 3]
    assert catalogue.category_keys[-1] == key_of(CATEGORY, "new")
    assert catalogue.category_weights(np.array([3, UNKNOWN]), np.arange(4)).tolist() == [[0, 0, 0.5, 0.5], [0, 0, 0, 0]]
    # A request that fetched its categories before the item was learned.
    assert catalogue.category_weights(np.array([3]), columns).tolist() == [[0, 0, 0.5]]


def test_popular_items_come_in_the_releases_order_without_the_excluded(catalogue: Catalogue) -> None:
    catalogue.learn([item(100, [])])

    assert catalogue.popular(5, set()) == [0, 1, 2]
    assert catalogue.popular(1, {7}) == [1]
    assert [catalogue.popularity(row) for row in (0, 1, 2, UNKNOWN)] == [1.0, 4 / 9, 0.0, 0.0]


def test_what_can_be_learned_is_bounded() -> None:
    catalogue = Catalogue([item(0, [])])

    catalogue.learn([item(key, []) for key in range(MAX_LEARNED + 50)])

    assert len(catalogue) <= MAX_LEARNED + 1


def test_an_empty_catalogue_knows_nothing() -> None:
    empty = Catalogue([])

    assert empty.popular(3, set()) == []
    assert empty.rows(np.array([1], np.int64)).tolist() == [UNKNOWN]
    assert empty.category_weights(np.array([UNKNOWN]), np.arange(0)).shape == (1, 0)
