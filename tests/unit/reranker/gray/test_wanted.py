from __future__ import annotations

import pytest

from reranker.gray.plan import Plan
from reranker.gray.state import KEEP_S, GrayRelease, State, wanted

PLAN = Plan(name="g", stable="a", candidate="b", path="/b")
KEEP_US = int(KEEP_S * 1e6)


def test_without_a_gray_release_nothing_runs_beside_the_first_one() -> None:
    assert wanted(None, "a", 0) == {}


@pytest.mark.parametrize("state", ["draft", "running", "paused", "promoted"])
def test_the_candidate_release_runs_from_the_draft_on(state: State) -> None:
    assert wanted(GrayRelease(plan=PLAN, state=state), "a", 10**18) == {"b": "/b"}


def test_an_aborted_release_stays_ready_for_a_minute() -> None:
    aborted = GrayRelease(plan=PLAN, state="aborted", changed_us=5)

    assert wanted(aborted, "a", 5 + KEEP_US) == {"b": "/b"}
    assert wanted(aborted, "a", 6 + KEEP_US) == {}


def test_a_stable_release_that_came_by_a_gray_release_runs_too() -> None:
    later = Plan(name="h", stable="b", candidate="c", path="/c")
    aborted = GrayRelease(plan=later, state="aborted", stable_path="/b")

    assert wanted(GrayRelease(plan=later, stable_path="/b"), "a", 0) == {"b": "/b", "c": "/c"}
    assert wanted(aborted, "a", 2 * KEEP_US) == {"b": "/b"}


def test_the_release_the_stack_was_started_with_is_not_started_twice() -> None:
    assert wanted(GrayRelease(plan=PLAN, state="promoted"), "b", 0) == {}
