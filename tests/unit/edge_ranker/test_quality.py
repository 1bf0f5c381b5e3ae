"""Measures of a ranking, against their definitions by counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_ranker.quality import auc, log_loss, measure, ndcg

scores = st.lists(st.integers(-5, 5), min_size=1, max_size=30).map(lambda x: np.array(x, np.float32))


@given(scores, scores)
def test_auc_is_the_share_of_pairs_in_the_right_order_with_ties_half(
    positive: np.ndarray, negative: np.ndarray
) -> None:
    difference = positive[:, None] - negative
    assert auc(positive, negative) == pytest.approx(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_auc_within_requests_ignores_what_lies_between_them() -> None:
    positive = np.array([1.0, 11.0], np.float32)
    negative = np.array([[0.0, 0.5], [10.0, 10.5]], np.float32)
    quality = measure(positive, negative)
    assert quality.gauc == 1.0
    assert quality.auc == 0.75
    assert quality.log_loss is None


def test_ndcg_counts_the_rank_and_puts_the_taken_item_last_among_equals() -> None:
    positive = np.array([3.0, 1.0, 0.0], np.float32)
    negative = np.array([[2.0, 1.0], [1.0, 0.0], [5.0, 4.0]], np.float32)
    assert ndcg(positive, negative) == pytest.approx((1 + 1 / np.log2(3) + 0.5) / 3)
    assert ndcg(np.zeros(1, np.float32), np.ones((1, 10), np.float32)) == 0.0


def test_log_loss_weighs_the_negatives_of_a_request_together() -> None:
    zeros = np.zeros((5, 7), np.float32)
    assert log_loss(zeros[:, 0], zeros, 4) == pytest.approx(np.log(2))
    sure = log_loss(np.full(5, 20, np.float32), np.full((5, 7), -20, np.float32), 4)
    assert sure < 1e-6
    assert log_loss(np.full(5, -20, np.float32), np.full((5, 7), -20, np.float32), 4) == pytest.approx(20 / 5, rel=1e-3)
