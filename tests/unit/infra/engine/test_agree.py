from __future__ import annotations

import numpy as np
import pytest

from infra.engine.agree import LARGEST_FP32, LARGEST_RMSE, disagreement

RECORDED = [np.random.default_rng(seed).standard_normal(50).astype(np.float32) * 3 for seed in range(8)]
SPREAD = float(np.concatenate(RECORDED).std())


def off_by(error: float) -> list[np.ndarray]:
    """Served logits whose error has this root mean square and as large a maximum."""
    signs = np.random.default_rng(99).choice((-1.0, 1.0), 50)
    return [(logits + error * signs).astype(np.float32) for logits in RECORDED]


def test_fp32_has_to_give_the_recorded_scores_to_rounding() -> None:
    limit = LARGEST_FP32 * float(np.abs(np.concatenate(RECORDED)).max())
    assert disagreement(RECORDED, off_by(0.9 * limit), "fp32") is None
    assert "up to 0.0011 of the largest" in str(disagreement(RECORDED, off_by(1.1 * limit), "fp32"))


def test_small_scores_have_to_be_given_to_a_fixed_difference() -> None:
    small = [logits * np.float32(1e-3) for logits in RECORDED]
    other = [logits + np.float32(1.1 * LARGEST_FP32) for logits in small]
    assert disagreement(small, other, "fp32") is not None


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_lower_precisions_may_differ_by_a_share_of_the_spread(precision: str) -> None:
    limit = LARGEST_RMSE[precision] * SPREAD

    assert disagreement(RECORDED, off_by(0.9 * limit), precision) is None
    assert "of their spread" in str(disagreement(RECORDED, off_by(1.1 * limit), precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_score_that_is_not_finite_never_agrees(precision: str) -> None:
    served = [logits.copy() for logits in RECORDED]
    served[3][7] = np.nan

    assert "1 of 400 scores are not finite" in str(disagreement(RECORDED, served, precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_scores_in_another_order_never_agree(precision: str) -> None:
    assert disagreement(RECORDED, [logits[::-1] for logits in RECORDED], precision) is not None


def test_requests_without_candidates_cannot_disagree() -> None:
    assert disagreement([np.empty(0, np.float32)], [np.empty(0, np.float32)], "fp32") is None
