from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.sequential import (
    counts_differ,
    mean_is_below,
    rate_is_higher,
    rate_is_lower,
    share_exceeds,
    threshold,
)

counts = st.integers(0, 5000)


def test_without_samples_there_is_no_evidence() -> None:
    assert share_exceeds(0, 0, 0.01) == 0.0
    assert rate_is_lower(0, 0, 0, 0, effect=0.2) == 0.0
    assert counts_differ(0, 0) == 0.0


@given(st.integers(1, 60), st.floats(0.001, 0.5))
def test_the_share_test_is_a_fair_bet_at_the_limit(n: int, limit: float) -> None:
    """The expected e-value is 1 exactly: what makes it safe to look at any time."""
    expected = sum(
        math.exp(share_exceeds(x, n, limit)) * math.comb(n, x) * limit**x * (1 - limit) ** (n - x) for x in range(n + 1)
    )

    assert expected == pytest.approx(1.0, rel=1e-6)


@given(st.integers(1, 60))
def test_the_test_of_equal_counts_is_a_fair_bet_too(n: int) -> None:
    expected = sum(math.exp(counts_differ(x, n - x)) * math.comb(n, x) * 0.5**n for x in range(n + 1))

    assert expected == pytest.approx(1.0, rel=1e-6)


@given(st.integers(1, 2000), st.floats(0.001, 0.5), st.data())
def test_more_faults_are_more_evidence(n: int, limit: float, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, n - 1))

    assert share_exceeds(x + 1, n, limit) > share_exceeds(x, n, limit)


@given(counts, counts)
def test_which_of_two_counts_is_larger_does_not_matter(one: int, other: int) -> None:
    assert counts_differ(one, other) == pytest.approx(counts_differ(other, one), abs=1e-9)


def test_a_mismatch_of_two_percent_is_seen_in_half_a_million_units_and_chance_is_not() -> None:
    assert counts_differ(255_000, 245_000) > threshold(0.001)
    assert counts_differ(250_400, 249_600) < threshold(0.001)


@given(counts, counts)
def test_lower_and_higher_are_never_both_shown(x: int, x_base: int) -> None:
    lower = rate_is_lower(x, 5000, x_base, 5000, effect=0.2)
    higher = rate_is_higher(x, 5000, x_base, 5000, effect=0.2)

    assert min(lower, higher) < threshold(0.1)


def test_a_few_events_are_no_evidence() -> None:
    assert rate_is_lower(0, 100, 19, 100, effect=0.2) == 0.0


@pytest.mark.parametrize("base", [0.01, 0.1, 0.5])
def test_with_equal_rates_looking_all_the_time_rarely_finds_a_difference(base: float) -> None:
    rng, looks, each, releases = np.random.default_rng(7), 200, 400, 300
    one = rng.binomial(each, base, (releases, looks)).cumsum(1).tolist()
    other = rng.binomial(each, base, (releases, looks)).cumsum(1).tolist()
    alpha = 0.02

    wrong = sum(
        any(
            rate_is_lower(one[i][k], n := each * (k + 1), other[i][k], n, effect=0.2) >= threshold(alpha)
            for k in range(looks)
        )
        for i in range(releases)
    )

    # Expected at most 6 of 300; 13 and more have a chance of under 1 %.
    assert wrong < 13


def test_a_large_drop_is_found_with_far_fewer_samples_than_a_small_one() -> None:
    def needed(rate: float) -> int:
        n = 100
        while rate_is_lower(round(rate * n), n, n // 10, n, effect=0.2) < threshold(0.005):
            n += 10
        return n

    assert needed(0.03) < needed(0.06) < needed(0.08) < 5000


def test_a_margin_is_ruled_out_when_rates_are_equal_and_not_when_the_drop_is_as_large() -> None:
    n = 20_000

    assert rate_is_higher(2000, n, 2000, n, factor=0.8, effect=0.2) > threshold(0.005)
    assert rate_is_higher(1600, n, 2000, n, factor=0.8, effect=0.2) < 0.0


@given(counts, counts)
def test_evidence_is_always_a_number(x: int, x_base: int) -> None:
    for n in (5000, 10_000_000):
        assert math.isfinite(rate_is_lower(x, n, x_base, n, effect=0.2))
        assert math.isfinite(rate_is_higher(x, n, x_base, n, factor=0.9, effect=0.1))


def test_a_mean_that_is_not_too_low_is_falsely_accused_at_most_as_often_as_alpha() -> None:
    rng = np.random.default_rng(7)
    accused = 0
    for _ in range(400):
        values = rng.binomial(100, rng.beta(5, 5, 400))  # mean one half
        counts: dict[int, int] = {}
        for value in values.tolist():
            counts[value] = counts.get(value, 0) + 1
            if sum(counts.values()) % 20 == 0 and mean_is_below(counts, 100, 0.5) >= threshold(0.05):
                accused += 1
                break
    assert accused <= 20


def test_a_mean_that_is_too_low_is_found() -> None:
    assert mean_is_below({30: 100}, 100, 0.5) >= threshold(0.005)
    assert mean_is_below({70: 100}, 100, 0.5) < 0
    assert mean_is_below({}, 100, 0.5) == 0.0
