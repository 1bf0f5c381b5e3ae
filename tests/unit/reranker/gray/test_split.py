from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.split import PPM, Arm, SplitPlan, assign, bucket_ppm, unit_of

RAMP = (10_000, 50_000, 250_000, 500_000, 1_000_000)
units = st.text(max_size=300)
weights = st.integers(0, PPM)


def plan(
    weight_ppm: int, *, holdout_ppm: int = 0, salt: str = "s", overrides: dict[str, Arm] | None = None
) -> SplitPlan:
    return SplitPlan("a", salt, "b", weight_ppm, holdout_ppm, overrides or {})


@given(st.text(max_size=50), units)
def test_a_bucket_is_a_whole_number_of_parts_per_million(salt: str, unit: str) -> None:
    bucket = bucket_ppm(salt, unit)

    assert isinstance(bucket, int)
    assert 0 <= bucket < PPM
    assert bucket == bucket_ppm(salt, unit)


def test_the_buckets_of_known_units_never_change() -> None:
    assert [bucket_ppm("salt", unit) for unit in ("196", "", "ü", "a" * 300)] == [
        979052,
        386831,
        241700,
        919368,
    ]


def test_another_process_puts_the_same_users_into_the_same_buckets() -> None:
    program = (
        "import hashlib; from reranker.gray.split import bucket_ppm\n"
        "print(hashlib.sha256(repr([bucket_ppm('s', f'user-{i}') for i in range(10_000)]).encode()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()

    here = hashlib.sha256(repr([bucket_ppm("s", f"user-{i}") for i in range(10_000)]).encode()).hexdigest()
    assert there == here


def test_salt_and_unit_cannot_be_confused() -> None:
    assert bucket_ppm("a", "bc") != bucket_ppm("ab", "c")


@given(units)
def test_without_a_gray_release_everybody_is_served_by_stable(unit: str) -> None:
    found = assign(SplitPlan(stable="r1", salt="s"), unit)

    assert (found.release, found.arm, found.reason) == ("r1", "stable", "no_gray_release")
    assert found.bucket_ppm == bucket_ppm("s", unit)


@given(units, weights, weights)
def test_a_growing_weight_never_takes_the_candidate_release_from_anybody(unit: str, one: int, other: int) -> None:
    small, large = sorted((one, other))

    if assign(plan(small), unit).arm == "candidate":
        assert assign(plan(large), unit).arm == "candidate"


@given(units)
def test_weight_zero_shows_the_candidate_release_to_nobody_and_full_weight_to_everybody(unit: str) -> None:
    assert assign(plan(0), unit).arm == "stable"
    assert assign(plan(PPM), unit).arm == "candidate"


@given(units, st.integers(0, PPM))
def test_the_holdout_never_sees_the_candidate_release(unit: str, holdout_ppm: int) -> None:
    found = assign(plan(PPM - holdout_ppm, holdout_ppm=holdout_ppm), unit)

    held = bucket_ppm("s", unit) >= PPM - holdout_ppm
    assert (found.arm, found.reason) == (("stable", "holdout") if held else ("candidate", "split"))


@given(weights, st.integers(0, PPM))
def test_baseline_and_compared_candidates_are_of_equal_size_and_never_overlap(weight: int, holdout: int) -> None:
    split = plan(min(weight, PPM - holdout), holdout_ppm=holdout)
    size, end = split.compared_ppm, PPM - holdout

    assert 0 <= size <= split.weight_ppm
    assert end - size >= split.weight_ppm


@given(units, weights, st.integers(0, 400_000))
def test_compared_units_lie_in_the_two_equal_intervals(unit: str, weight: int, holdout: int) -> None:
    split = plan(min(weight, PPM - holdout), holdout_ppm=holdout)
    found = assign(split, unit)
    size, end = split.compared_ppm, PPM - holdout

    bucket = found.bucket_ppm
    assert found.compared == (bucket < size or end - size <= bucket < end)


@given(units, weights, weights)
def test_nobody_moves_between_the_two_samples_while_a_ramp_grows(unit: str, one: int, other: int) -> None:
    small, large = (assign(plan(weight), unit) for weight in sorted((one, other)))

    if small.compared and large.compared and small.arm != large.arm:
        # Only from the baseline to the candidate release, when the ramp reaches the unit.
        assert small.arm == "stable"


@given(units, weights, st.sampled_from(["stable", "candidate"]))
def test_a_named_user_has_his_arm_whatever_the_weight(unit: str, weight: int, arm: Arm) -> None:
    found = assign(plan(weight, overrides={"vip": arm}), unit, "vip")

    assert (found.arm, found.reason, found.compared) == (arm, "override", False)
    assert found.release == ("b" if arm == "candidate" else "a")


def test_what_a_caller_with_the_token_asks_for_wins_over_the_list_of_users() -> None:
    assert assign(plan(0, overrides={"vip": "stable"}), "vip", "vip", "candidate").release == "b"


def test_no_override_brings_back_an_aborted_release() -> None:
    aborted = SplitPlan("a", "s", None, overrides={"vip": "candidate"}, idle_reason="aborted")

    assert assign(aborted, "vip", "vip", "candidate")[:2] == ("a", "stable")
    assert assign(aborted, "vip").reason == "aborted"


def intervals(split: SplitPlan, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(is candidate, is compared) of many buckets: `assign` without overrides, for whole populations."""
    size, end = split.compared_ppm, PPM - split.holdout_ppm
    return buckets < split.weight_ppm, (buckets < size) | ((buckets >= end - size) & (buckets < end))


@given(st.lists(units, max_size=20), weights, st.integers(0, PPM))
def test_the_intervals_for_whole_populations_are_those_of_single_users(
    names: list[str], weight: int, held: int
) -> None:
    split = plan(min(weight, PPM - held), holdout_ppm=held)
    found = [assign(split, name) for name in names]
    candidate, compared = intervals(split, np.array([bucket_ppm("s", name) for name in names], np.int64))

    assert candidate.tolist() == [one.arm == "candidate" for one in found]
    assert compared.tolist() == [one.compared for one in found]


@pytest.fixture(scope="module")
def buckets() -> dict[str, np.ndarray]:
    n = 300_000
    return {
        salt: np.fromiter((bucket_ppm(salt, f"user-{i}") for i in range(n)), np.int64, n) for salt in ("one", "two")
    }


@pytest.mark.parametrize("weight", RAMP[:-1])
def test_each_step_serves_the_share_it_says(buckets: dict[str, np.ndarray], weight: int) -> None:
    n, p = buckets["one"].size, weight / PPM
    served = int(intervals(plan(weight), buckets["one"])[0].sum())

    assert abs(served - n * p) <= 3 * (n * p * (1 - p)) ** 0.5


def test_two_salts_split_independently(buckets: dict[str, np.ndarray]) -> None:
    cells = np.bincount(buckets["one"] * 10 // PPM * 10 + buckets["two"] * 10 // PPM, minlength=100).reshape(10, 10)
    expected = cells.sum(1, keepdims=True) * cells.sum(0, keepdims=True) / cells.sum()

    # Chi-square with 81 degrees of freedom: 126.1 is exceeded once in a thousand tables.
    assert ((cells - expected) ** 2 / expected).sum() < 126.1


def test_the_unit_is_what_the_plan_says_or_the_next_best_thing() -> None:
    ids = {"user_id": "u", "session_id": "s", "request_id": "r"}

    assert unit_of("user_id", **ids) == "u"
    assert unit_of("session_id", **ids) == "s"
    assert unit_of("header:x-device", **ids, header="d") == "d"
    assert unit_of("header:x-device", **ids) == "u"
    assert unit_of("session_id", user_id="u", session_id=None, request_id="r") == "u"
    assert unit_of("user_id", user_id=None, session_id=None, request_id="r") == "r"
