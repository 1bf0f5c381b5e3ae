from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.decide import decide
from reranker.gray.measures import Figures
from reranker.gray.plan import HARD_GATES, Gate, Plan, Step
from reranker.gray.readings import Readings, Window
from reranker.gray.state import GrayRelease, State

GOOD = Figures(requests=3000, units=900, latency={60: 1500, 70: 1400, 80: 70, 90: 30})
BAD = replace(GOOD, degraded=3000)
HOLD_S = 60.0
PLAN = Plan(
    name="g", stable="a", candidate="b", path="/b", gates=HARD_GATES,
    steps=tuple(Step(weight_ppm=weight, hold_s=HOLD_S, min_samples=1000) for weight in (10_000, 500_000)),
)  # fmt: skip
AS_GIVEN = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__}


def running(plan: Plan = PLAN, step: int = 0, state: State = "running") -> GrayRelease:
    return GrayRelease(plan=plan, state=state, step=step, weight_ppm=plan.steps[step].weight_ppm)


def readings(candidate: Figures = GOOD, baseline: Figures = GOOD) -> Readings:
    window = Window(candidate, candidate, baseline)
    return Readings((window,) * 3, window, window)


LATER = int(HOLD_S * 1e6)


def test_healthy_and_held_long_enough_goes_one_step_on() -> None:
    found = decide(running(), readings(), LATER)

    assert (found.act, found.verdict) == ("step", "healthy")
    assert found.sentence == "all 5 gates are healthy after 3000 requests of this step"


def test_a_step_is_held_for_its_time() -> None:
    found = decide(running(), readings(), LATER - 1_000_000)

    assert (found.act, found.verdict) == ("hold", "healthy")
    assert found.sentence.endswith("held for another 1 s")


@given(st.integers(0, 999), st.integers(0, 10**15))
def test_no_time_makes_up_for_missing_samples(n: int, now_us: int) -> None:
    few, plan = Figures(requests=n), Plan(**{**AS_GIVEN, "gates": HARD_GATES[:3], "auto_promote": True})

    assert decide(running(plan, 1), readings(few, GOOD), now_us).act == "hold"
    assert decide(running(plan, 1), readings(GOOD, few), now_us).act == "hold"


@pytest.mark.parametrize("on_fail", ["abort", "pause"])
def test_a_failed_gate_does_what_the_plan_says_at_once(on_fail: str) -> None:
    plan = Plan(**{**AS_GIVEN, "on_fail": on_fail})
    found = decide(running(plan), readings(BAD), 0)

    assert (found.act, found.verdict) == (on_fail, "unhealthy")
    assert found.sentence.startswith("degraded_share: 3000 of 3000")


def test_the_last_step_waits_for_somebody_to_promote() -> None:
    found = decide(running(step=1), readings(), LATER)

    assert found.act == "hold"
    assert found.sentence.endswith("ready to promote")


def test_or_is_promoted_when_the_plan_says_so() -> None:
    plan = Plan(**{**AS_GIVEN, "auto_promote": True})

    assert decide(running(plan, 1), readings(), LATER).act == "promote"


def test_a_mismatch_of_the_samples_blocks_every_step() -> None:
    found = decide(running(), readings(replace(GOOD, units=5000), replace(GOOD, units=6000)), LATER)

    assert (found.act, found.verdict) == ("hold", "inconclusive")
    assert found.sentence.startswith("sample ratio mismatch")


def test_a_failed_gate_wins_over_a_mismatch() -> None:
    found = decide(running(), readings(replace(BAD, units=5000), replace(GOOD, units=6000)), LATER)

    assert found.act == "abort"


def test_a_dry_run_gate_is_shown_and_not_acted_upon() -> None:
    plan = Plan(
        name="g", stable="a", candidate="b", path="/b", gates=(Gate(metric="degraded_share", limit=0.05, dry_run=True),)
    )
    found = decide(running(plan), readings(BAD), LATER)

    assert found.act == "step"
    assert (found.findings[0].verdict, found.findings[0].dry_run) == ("unhealthy", True)


SHADOWED = Plan(
    **{
        **AS_GIVEN,
        "steps": (Step(weight_ppm=0, shadow_ppm=100_000, hold_s=HOLD_S, min_samples=200), *PLAN.steps),
        "gates": (*HARD_GATES, Gate(metric="overlap_at_k", kind="minimum", limit=0.5)),
    }
)


def in_shadow(shadow: Figures) -> Readings:
    window = Window(shadow=shadow, shadowed=replace(GOOD, requests=shadow.requests, units=0))
    return Readings((window,) * 3, window, window)


def test_a_step_that_shows_nothing_is_judged_by_shadow_traffic() -> None:
    found = decide(running(SHADOWED), in_shadow(Figures(requests=300, overlap={90: 300})), LATER)

    assert (found.act, found.verdict) == ("step", "healthy")
    waiting = [finding.metric for finding in found.findings if finding.waits]
    assert waiting == ["deadline_miss_share", "latency_p99", "latency_p50"]


def test_a_release_that_fails_in_the_shadow_is_shown_to_nobody() -> None:
    for shadow in (Figures(requests=300, overlap={10: 300}), Figures(requests=300, degraded=300)):
        assert decide(running(SHADOWED), in_shadow(shadow), LATER).act == "abort"


def test_a_step_that_shows_nothing_waits_for_its_comparisons() -> None:
    found = decide(running(SHADOWED), in_shadow(Figures(requests=199, overlap={90: 199})), LATER)

    assert (found.act, found.sentence) == ("hold", "199 of 200 requests of this step")


@pytest.mark.parametrize("state", ["draft", "paused", "promoted", "aborted"])
def test_only_a_running_release_is_acted_upon(state: State) -> None:
    assert decide(running(state=state), readings(BAD), LATER).act == "hold"


def test_where_everybody_has_the_candidate_release_its_own_requests_count() -> None:
    plan = Plan(
        name="g", stable="a", candidate="b", path="/b", gates=HARD_GATES[:3], steps=(Step(weight_ppm=1_000_000),)
    )
    window = Window(GOOD, Figures(), Figures())

    assert decide(running(plan), Readings((window,) * 3, window, window), LATER).verdict == "healthy"
