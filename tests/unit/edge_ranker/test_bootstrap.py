"""The paired bootstrap: its measures are those of the report, its intervals hold what they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_ranker.bootstrap import MEASURES, paired_differences
from edge_ranker.quality import measure


def _scores(rng: np.random.Generator, users: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """A ranker whose skill varies from user to user."""
    skill = strength + rng.normal(0, 0.3, users.max() + 1)[users]
    positive = (skill + rng.normal(0, 1, users.size)).astype(np.float32)
    return positive, rng.normal(0, 1, (users.size, 20)).astype(np.float32).round(1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), n_users=st.integers(2, 12))
def test_the_measures_are_those_of_the_report(seed: int, n_users: int) -> None:
    rng = np.random.default_rng(seed)
    users = rng.integers(0, n_users, 60) * 7
    ours, theirs = _scores(rng, users, 1.0), _scores(rng, users, 0.5)
    found = paired_differences(ours, theirs, users, rng, draws=10)
    for name in MEASURES:
        assert found[name].ours == pytest.approx(getattr(measure(*ours), name))
        assert found[name].theirs == pytest.approx(getattr(measure(*theirs), name))


def test_a_ranker_does_not_differ_from_itself() -> None:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 30, 200)
    scores = _scores(rng, users, 1.0)
    for difference in paired_differences(scores, scores, users, rng).values():
        assert difference.low == difference.high == 0
        assert not difference.certain


def test_a_clear_difference_is_certain_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 60, 600)
    found = paired_differences(_scores(rng, users, 2.0), _scores(rng, users, 0.2), users, rng)
    for difference in found.values():
        assert difference.certain
        assert difference.low < difference.ours - difference.theirs < difference.high
    shown = found["auc"].as_dict()
    assert shown["difference"] == pytest.approx(shown["ours"] - shown["theirs"], abs=2e-5)


def test_intervals_hold_no_difference_about_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(60):
        users = rng.integers(0, 40, 160)
        found = paired_differences(_scores(rng, users, 1.0), _scores(rng, users, 1.0), users, rng, draws=200)
        held += not found["auc"].certain
    assert held >= 50


def test_users_not_requests_are_drawn() -> None:
    """One user with many requests that all go one way says less than many users who do."""
    rng = np.random.default_rng(0)
    positive, negative = np.ones(200, np.float32), np.zeros((200, 5), np.float32)
    worse = np.where(np.arange(200) < 100, 1.0, -1.0).astype(np.float32)
    two, many = np.arange(200) // 100, np.arange(200)
    width = {}
    for name, users in (("two", two), ("many", many)):
        found = paired_differences((positive, negative), (worse, negative), users, rng)["gauc"]
        width[name] = found.high - found.low
    assert width["two"] > 5 * width["many"]
