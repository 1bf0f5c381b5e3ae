"""Scores: what is used more, or later, has the greater one, at whatever moment it is looked at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_server.eviction import GAIN_STEP, PINNED, Policy, gains

LFU = Policy("lfu", half_life_s=100.0)


def used(policy: Policy, ages_s: list[float]) -> int:
    """Score of a row that arrived at the first age and was used at the others; what the compiled loop does."""
    table = gains()
    score = int(policy.fresh(np.ones(1), policy.tick(ages_s[0]))[0])
    for age_s in ages_s[1:]:
        tick = policy.tick(age_s)
        high, apart = max(score, tick), abs(score - tick) // GAIN_STEP
        score = min(high + (int(table[apart]) if apart < table.size else 0), PINNED - 1)
    return score


@given(ages_s=st.lists(st.floats(0, 5000), min_size=1, max_size=40).map(sorted))
def test_an_lfu_score_is_the_logarithm_of_uses_each_halved_by_its_age(ages_s: list[float]) -> None:
    now_s = ages_s[-1]
    exact = sum(2 ** (-(now_s - age_s) / 100.0) for age_s in ages_s)
    got = LFU.counts(np.array([used(LFU, ages_s)], np.uint32), LFU.tick(now_s))[0]
    assert got == pytest.approx(exact, rel=0.03)


def test_ten_uses_long_ago_weigh_less_than_two_now() -> None:
    assert used(LFU, [0.0] * 10) < used(LFU, [500.0] * 2)
    assert used(LFU, [0.0] * 10) > used(LFU, [100.0] * 2)


def test_with_lru_only_the_last_use_counts() -> None:
    policy = Policy("lru")
    assert policy.tick(10.0) > policy.tick(9.9)
    assert policy.fresh(np.array([200, 1]), policy.tick(5.0)).tolist() == [policy.tick(5.0)] * 2


def test_a_row_that_was_asked_for_more_often_arrives_with_a_greater_lfu_score() -> None:
    scores = LFU.fresh(np.array([0, 1, 2, 255], np.uint8), LFU.tick(50.0)).tolist()
    assert scores[0] == scores[1] < scores[2] < scores[3]
    assert LFU.counts(np.array(scores, np.uint32), LFU.tick(50.0)) == pytest.approx([1, 1, 2, 255], rel=0.01)


def test_only_ttl_expires_and_what_arrived_before_goes() -> None:
    policy = Policy("ttl", ttl_s=60.0)
    assert policy.tick(39.0) < policy.expired_below(100.0) <= policy.tick(40.1)
    assert policy.expired_below(30.0) == 0
    assert LFU.expired_below(1e6) == Policy("lru").expired_below(1e6) == 0


@pytest.mark.parametrize("policy", [LFU, Policy("lru"), Policy("ttl")])
def test_no_age_reaches_the_score_of_a_pinned_row(policy: Policy) -> None:
    assert policy.tick(1e12) < PINNED
    assert policy.fresh(np.array([255]), policy.tick(1e12))[0] < PINNED


@pytest.mark.parametrize("policy", [LFU, Policy("lru"), Policy("ttl")])
def test_later_uses_count_for_more_in_a_hot_list(policy: Policy) -> None:
    counts = policy.counts(np.array([policy.tick(10.0), policy.tick(400.0)], np.uint32), policy.tick(500.0))
    assert 0 < counts[0] < counts[1] <= 1
