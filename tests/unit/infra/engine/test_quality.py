"""What a precision may lose, and how the report says that it lost more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.engine.quality import Limits, Scored, change, compare, overlap, refusals

LIMITS = Limits(max_auc_loss_pct=0.05, max_log_loss_rise_pct=0.5, max_logit_rmse=0.15, min_overlap_at_20=0.97)


def scored(n: int = 400, seed: int = 0) -> Scored:
    random = np.random.default_rng(seed)
    taken = random.normal(1.5, 1.0, n).astype(np.float32)
    return Scored(
        taken,
        {
            kind: random.normal(mean, 1.0, (n, 60)).astype(np.float32)
            for kind, mean in (("uniform", 0.0), ("popularity", 0.6))
        },
    )


def moved(scores: Scored, by: float, seed: int = 1) -> Scored:
    random = np.random.default_rng(seed)

    def near(values: np.ndarray) -> np.ndarray:
        return (values + random.normal(0, by, values.shape)).astype(np.float32)

    return Scored(near(scores.taken), {kind: near(values) for kind, values in scores.negatives.items()})


def test_fp32_beside_itself_loses_nothing() -> None:
    comparison = compare(scored(), scored(), 4.0)
    assert comparison.logit_rmse == comparison.largest_logit_difference == 0.0
    assert comparison.overlap_at_20 == 1.0
    assert (comparison.requests, comparison.candidates) == (400, 121)
    for c in comparison.by_negatives.values():
        assert c.auc == c.auc_fp32
        assert c.auc_loss_pct == c.auc_noise_pct == c.log_loss_rise_pct == 0.0
    nothing = Limits(max_auc_loss_pct=0.0, max_log_loss_rise_pct=0.0, max_logit_rmse=0.0, min_overlap_at_20=1.0)
    assert refusals(comparison, nothing) == []


def test_a_small_change_is_released_and_a_large_one_is_refused_for_every_reason() -> None:
    assert refusals(compare(scored(), moved(scored(), 0.002), 4.0), LIMITS) == []
    reasons = refusals(compare(scored(), moved(scored(), 0.8), 4.0), LIMITS)
    for part in (
        "AUC (uniform) falls by",
        "AUC (popularity) falls by",
        "log-loss (uniform) rises by",
        "logits move by 0.7",
        "of the first 20 are those of FP32, fewer than 0.97",
    ):
        assert any(part in reason for reason in reasons), (part, reasons)


def test_logits_that_keep_their_order_and_move_are_seen() -> None:
    before = scored()
    louder = Scored(before.taken * 1.5, {kind: values * 1.5 for kind, values in before.negatives.items()})
    comparison = compare(before, louder, 4.0)
    assert comparison.by_negatives["uniform"].auc_loss_pct == pytest.approx(0.0, abs=1e-9)
    assert any("logits move" in reason for reason in refusals(comparison, LIMITS))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    after = scored()
    after.taken[3] = bad
    assert refusals(compare(scored(), after, 4.0), LIMITS) == ["scores are not finite on held-out requests"]


def test_an_auc_loss_that_may_be_chance_is_not_refused_on_few_requests_and_is_on_many() -> None:
    def reasons(n: int) -> list[str]:
        found = refusals(compare(scored(n), moved(scored(n), 0.3), 4.0), LIMITS)
        return [reason for reason in found if reason.startswith("AUC")]

    assert reasons(4000)
    few = compare(scored(5), moved(scored(5), 0.3), 4.0).by_negatives["uniform"]
    assert few.auc_noise_pct > 1.0
    one = compare(scored(1), moved(scored(1), 0.3), 4.0)
    assert not [reason for reason in refusals(one, LIMITS) if reason.startswith("AUC")]
    assert one.as_dict()["by_negatives"]["uniform"]["auc_noise_pct"] is None


def test_the_noise_is_what_drawing_the_requests_again_gives() -> None:
    random = np.random.default_rng(5)
    before, after = scored(300), moved(scored(300), 0.3)
    found = change(before.taken, before.negatives["uniform"], after.taken, after.negatives["uniform"], 4.0)
    losses = []
    for _ in range(300):
        rows = random.integers(0, 300, 300)
        again = change(
            before.taken[rows],
            before.negatives["uniform"][rows],
            after.taken[rows],
            after.negatives["uniform"][rows],
            4.0,
        )
        losses.append(again.auc_loss_pct)
    assert found.auc_noise_pct == pytest.approx(2 * np.std(losses), rel=0.15)


@given(st.integers(0, 1000))
def test_the_auc_is_the_share_of_pairs_in_order_with_ties_half(seed: int) -> None:
    random = np.random.default_rng(seed)
    taken, negatives = (random.integers(0, 6, shape).astype(np.float32) for shape in (7, (7, 5)))
    pairs = taken[:, None] - negatives.ravel()[None]
    expected = float(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    found = change(taken, negatives, taken + 1, negatives + 1, 4.0)
    assert found.auc_fp32 == pytest.approx(expected)
    assert found.auc == pytest.approx(expected)


def test_overlap_counts_what_is_among_the_first_of_both() -> None:
    before = np.array([[5.0, 4.0, 3.0, 2.0], [5.0, 4.0, 3.0, 2.0]], np.float32)
    after = np.array([[5.0, 1.0, 3.0, 2.0], [4.0, 5.0, 3.0, 2.0]], np.float32)
    assert overlap(before, after, 2) == 0.75
    assert overlap(before, after, 9) == 1.0


def test_candidates_that_are_the_same_item_are_one_of_the_first() -> None:
    items = np.array([[7, 8, 7, 7, 9, 5]])
    before = np.array([[5.0, 4.0, 5.0, 5.0, 3.0, 1.0]], np.float32)
    after = np.array([[4.0, 5.0, 4.0, 4.0, 3.0, 1.0]], np.float32)
    assert overlap(before, after, 2) == 0.5
    assert overlap(before, after, 2, items) == 1.0
    swapped = np.array([[5.0, 3.0, 5.0, 5.0, 4.0, 1.0]], np.float32)
    assert overlap(before, swapped, 2, items) == 0.5
