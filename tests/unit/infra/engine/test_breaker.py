from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.engine.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILURES, QUIET_S, WINDOW_S, Breaker


def test_a_closed_breaker_never_asks_for_a_trial() -> None:
    breaker = Breaker()

    assert not breaker.open
    assert breaker.trial_due_s(5.0) == float("inf")


def test_a_trial_is_due_when_the_pause_is_over() -> None:
    breaker = Breaker(first_pause_s=2.0)

    assert breaker.trip(10.0) == 2.0
    assert breaker.open
    assert breaker.trial_due_s(11.5) == 0.5
    assert breaker.trial_due_s(12.0) == 0.0


def test_every_trial_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker = Breaker()

    pauses = [breaker.trip(float(at)) for at in range(12)]

    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_an_engine_that_served_well_for_long_starts_over_with_the_first_pause() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    breaker.trip(1.0)
    breaker.close(3.0)

    assert breaker.trip(3.0 + QUIET_S) == FIRST_PAUSE_S


@given(st.lists(st.floats(0.0, QUIET_S * 0.9), min_size=1, max_size=30))
def test_while_an_engine_flaps_the_pause_never_shrinks(served_s: list[float]) -> None:
    breaker, now_s = Breaker(), 0.0
    pauses = [breaker.trip(now_s)]
    for seconds in served_s:
        now_s += breaker.trial_due_s(now_s)
        breaker.close(now_s)
        now_s += seconds
        pauses.append(breaker.trip(now_s))

    assert pauses == sorted(pauses)
    assert pauses[-1] == min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** len(served_s))


def test_failures_are_too_many_only_when_they_are_close_together() -> None:
    often, seldom = Breaker(), Breaker()

    assert [often.failed(float(at)) for at in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [True]
    assert not any(seldom.failed(at * WINDOW_S) for at in range(3 * MAX_FAILURES))
