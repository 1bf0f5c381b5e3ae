from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import InvalidInput
from reranker.gray.plan import Plan, Step
from reranker.gray.split import assign
from reranker.gray.state import ALLOWED, Action, GrayRelease, TransitionRefused, Verdict, change, split_of

PLAN = Plan(
    name="g",
    stable="a",
    candidate="b",
    path="/b",
    steps=(Step(weight_ppm=10_000), Step(weight_ppm=500_000)),
    max_weight_ppm=600_000,
)
actions = st.lists(
    st.tuples(st.sampled_from(sorted(ALLOWED)), st.sampled_from(["healthy", "unhealthy", "inconclusive"])), max_size=30
)


def walked(steps: list[tuple[Action, Verdict]]) -> list[tuple[GrayRelease, Action, Verdict]]:
    """Every change that was accepted, with the release after it."""
    release, found = GrayRelease(plan=PLAN), []
    for at, (action, verdict) in enumerate(steps):
        try:
            release = change(release, action, at_us=at, why="", verdict=verdict, weight_ppm=at)
        except TransitionRefused:
            continue
        found.append((release, action, verdict))
    return found


@given(actions)
def test_an_aborted_release_never_serves_again(steps: list[tuple[Action, Verdict]]) -> None:
    states = [release.state for release, _, _ in walked(steps)]

    if "aborted" in states:
        assert states.index("aborted") == len(states) - 1


@given(actions)
def test_a_step_and_a_promotion_need_healthy_gates(steps: list[tuple[Action, Verdict]]) -> None:
    for _, action, verdict in walked(steps):
        if action in ("step", "promote"):
            assert verdict == "healthy"


@given(actions)
def test_a_promoted_release_has_been_through_every_step(steps: list[tuple[Action, Verdict]]) -> None:
    for release, action, _ in walked(steps):
        if action == "promote":
            assert release.at_last_step


@given(actions)
def test_every_change_has_a_version_of_its_own(steps: list[tuple[Action, Verdict]]) -> None:
    versions = [1, *(release.version for release, _, _ in walked(steps))]

    assert all(later == earlier + 1 for earlier, later in pairwise(versions))


@given(actions)
def test_only_a_running_or_paused_release_is_shown(steps: list[tuple[Action, Verdict]]) -> None:
    for release, _, _ in walked(steps):
        split = split_of(release, 7)
        assert (split.candidate is not None) == (release.state in ("running", "paused"))
        assert split.stable == ("b" if release.state == "promoted" else "a")
        assert split.version == 7


@given(actions, st.text(max_size=20))
def test_after_an_abort_nobody_gets_the_release(steps: list[tuple[Action, Verdict]], unit: str) -> None:
    for release, _, _ in walked(steps):
        if release.state == "aborted":
            assert assign(split_of(release, 1), unit, unit, "candidate").release == "a"


def test_a_draft_is_shown_to_nobody() -> None:
    assert assign(split_of(GrayRelease(plan=PLAN), 1), "u")[:2] == ("a", "stable")


def test_starting_begins_with_the_first_weight() -> None:
    started = change(GrayRelease(plan=PLAN), "start", at_us=5, why="go")

    assert (started.state, started.weight_ppm, started.since_us, started.reason) == ("running", 10_000, 5, "go")


def test_pausing_keeps_the_weight_and_resuming_begins_the_hold_again() -> None:
    started = change(GrayRelease(plan=PLAN), "start", at_us=5, why="")
    paused = change(started, "pause", at_us=9, why="lunch")
    resumed = change(paused, "resume", at_us=20, why="")

    assert split_of(paused, 1).weight_ppm == 10_000
    assert (resumed.since_us, resumed.weight_ppm) == (20, 10_000)


def test_a_weight_over_the_maximum_is_refused() -> None:
    started = change(GrayRelease(plan=PLAN), "start", at_us=5, why="")

    with pytest.raises(InvalidInput, match="max_weight_ppm"):
        change(started, "weight", at_us=6, why="", weight_ppm=600_001)


def test_a_rolled_back_release_is_aborted() -> None:
    release = GrayRelease(plan=PLAN)
    for action in ("start", "step", "promote"):
        release = change(release, action, at_us=1, why="", verdict="healthy")
    assert split_of(release, 1).stable == "b"

    back = change(release, "rollback", at_us=2, why="regret")
    assert (back.state, split_of(back, 1).stable) == ("aborted", "a")
