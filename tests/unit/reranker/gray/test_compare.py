from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.compare import kendall_distance, likeness

LISTS = st.lists(st.sampled_from("abcdefgh"), max_size=6, unique=True)


def test_the_same_answer_is_alike_in_every_way() -> None:
    found = likeness(["a", "b", "c"], ["a", "b", "c"])

    assert (found.overlap, found.agreement) == (1.0, 1.0)


def test_the_same_items_upside_down_are_all_there_and_agree_in_nothing() -> None:
    found = likeness(["a", "b", "c"], ["c", "b", "a"])

    assert (found.overlap, found.agreement) == (1.0, 0.0)


def test_answers_without_a_common_item_are_alike_in_nothing() -> None:
    found = likeness(["a", "b"], ["x", "y"])

    assert (found.overlap, found.agreement) == (0.0, 0.0)


def test_one_item_of_three_exchanged_at_the_end() -> None:
    found = likeness(["a", "b", "c"], ["a", "b", "d"])

    # Of six pairs only (c, d) is the other way round; the most these lists could contradict each other is 6.
    assert found.overlap == pytest.approx(2 / 3)
    assert found.agreement == pytest.approx(1 - 1 / 6)


@given(LISTS, LISTS)
def test_the_distance_is_the_same_both_ways_within_its_bounds_and_zero_only_for_the_same(
    one: list[str], other: list[str]
) -> None:
    found = kendall_distance(one, other)

    assert found == kendall_distance(other, one)
    assert 0.0 <= found <= 1.0
    if len(one) == len(other):
        assert (found == 0.0) == (one == other)


def test_orders_drawn_at_random_agree_by_half() -> None:
    found = [likeness("abcd", order).agreement for order in permutations("abcd")]

    assert math.fsum(found) / len(found) == pytest.approx(0.5)
