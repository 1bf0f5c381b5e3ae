from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.gates import judge, mismatch
from reranker.gray.measures import Figures
from reranker.gray.plan import HARD_GATES, Gate
from reranker.gray.readings import Readings, Window

DEGRADED = Gate(metric="degraded_share", limit=0.05)
P99 = Gate(metric="latency_p99", kind="ratio", limit=1.5)
CLICKS = Gate(metric="click_through", kind="non_inferiority", limit=0.2)

GOOD = Figures(
    requests=3000, units=900, impressions=60_000, events={"click": 6000}, latency={60: 1500, 70: 1400, 80: 70, 90: 30}
)


def same(window: Window) -> Readings:
    return Readings((window,) * 3, window, window)


def window(candidate: Figures, baseline: Figures = GOOD) -> Window:
    return Window(candidate, candidate, baseline)


@pytest.mark.parametrize("gate", [*HARD_GATES, CLICKS], ids=lambda gate: gate.metric)
def test_a_release_that_does_as_well_as_stable_is_healthy(gate: Gate) -> None:
    found = judge(gate, same(window(GOOD)))

    assert found.verdict == "healthy", found.sentence


@pytest.mark.parametrize("gate", [*HARD_GATES, CLICKS], ids=lambda gate: gate.metric)
def test_without_samples_every_gate_is_inconclusive_and_says_so(gate: Gate) -> None:
    found = judge(gate, same(Window()))

    assert found.verdict == "inconclusive"
    assert "0 samples" in found.sentence


@given(st.integers(0, 99), st.sampled_from([*HARD_GATES, CLICKS]))
def test_too_little_data_is_never_healthy(n: int, gate: Gate) -> None:
    few = Figures(requests=n, impressions=n, latency={60: n} if n else {})

    assert judge(gate, same(window(few))).verdict != "healthy"


def test_twenty_bad_answers_of_twenty_are_enough() -> None:
    found = judge(DEGRADED, same(window(Figures(requests=20, degraded=20))))

    assert found.verdict == "unhealthy"
    assert found.sentence == "degraded_share: 20 of 20 (100.00%) in the last 10 s, allowed is 5.00%"
    assert (found.candidate, found.baseline) == (1.0, 0.0)


def test_one_bad_answer_is_not() -> None:
    assert judge(DEGRADED, same(window(replace(GOOD, degraded=1)))).verdict == "healthy"
    assert judge(DEGRADED, same(window(Figures(requests=1, degraded=1)))).verdict == "inconclusive"


def test_a_fault_that_begins_after_a_million_good_answers_is_seen() -> None:
    step = window(Figures(requests=1_000_000, degraded=100))
    now = window(Figures(requests=500, degraded=200))

    assert judge(DEGRADED, Readings((now, step, step), step, step)).verdict == "unhealthy"


def test_what_stable_suffers_too_is_not_the_fault_of_the_candidate_release() -> None:
    away = replace(GOOD, degraded=3000)

    assert judge(DEGRADED, same(window(away, away))).verdict != "unhealthy"


def test_slower_tails_are_found_though_the_median_is_the_same() -> None:
    slow = replace(GOOD, latency={60: 1500, 70: 1350, 100: 150})

    found = judge(P99, same(window(slow)))

    assert found.verdict == "unhealthy"
    assert "more than 1.5 times the baseline's" in found.sentence


def test_a_twice_as_fast_release_is_healthy() -> None:
    fast = replace(GOOD, latency={46: 1500, 56: 1400, 66: 70, 76: 30})

    assert judge(P99, same(window(fast))).verdict == "healthy"


def test_without_a_baseline_now_latencies_are_judged_by_what_was_compared_before() -> None:
    alone = window(GOOD, Figures())

    assert judge(P99, Readings((alone,) * 3, alone, window(GOOD))).verdict == "healthy"


def test_fewer_clicks_are_found() -> None:
    found = judge(CLICKS, same(window(replace(GOOD, events={"click": 4800}))))

    assert found.verdict == "unhealthy"
    assert found.sentence.endswith("it is lower")


def test_superiority_wants_more_than_equality() -> None:
    better = Gate(metric="click_through", kind="superiority", limit=0.1)

    assert judge(better, same(window(GOOD))).verdict == "inconclusive"
    assert judge(better, same(window(replace(GOOD, events={"click": 6900})))).verdict == "healthy"


def test_unequal_samples_raise_the_alarm() -> None:
    assert mismatch(window(replace(GOOD, units=9_000), replace(GOOD, units=9_100))).verdict == "healthy"
    found = mismatch(window(replace(GOOD, units=9_000), replace(GOOD, units=10_000)))

    assert found.verdict == "unhealthy"
    assert found.sentence.startswith("sample ratio mismatch: 9000 units")
