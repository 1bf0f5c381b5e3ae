"""The optimiser of rows that are elsewhere, against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from reranker.remote.rowwise import RowwiseAdam


def test_the_first_step_of_a_row_is_the_rate_times_its_gradient_over_its_root_mean_square() -> None:
    rows, gradients = np.zeros((2, 4), np.float32), np.array([[3, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    at, change = RowwiseAdam({"item": 5}, weight_decay=0.0).change("item", np.array([4, 0]), rows, gradients, 0.1)
    assert at.tolist() == [0, 1]
    np.testing.assert_allclose(change, [[-0.2, 0, 0, 0], [-0.1] * 4], rtol=1e-5)


def test_a_row_without_gradient_neither_changes_nor_counts() -> None:
    optimizer = RowwiseAdam({"item": 3}, weight_decay=0.5)
    rows, none = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    one = np.array([[0, 0], [1, 1]], np.float32)
    for _ in range(3):
        at, _ = optimizer.change("item", np.array([0, 1]), rows, one, 0.1)
        assert at.tolist() == [1]
    at, change = optimizer.change("item", np.array([0]), rows[:1], one[1:], 0.1)
    np.testing.assert_allclose(change, [[-0.15, -0.15]], rtol=1e-5)
    assert optimizer.change("item", np.array([0, 1]), rows, none, 0.1)[0].size == 0


def test_the_mean_square_follows_the_steps_that_touch_the_row() -> None:
    optimizer = RowwiseAdam({"item": 1}, weight_decay=0.0)
    rows = np.zeros((1, 2), np.float32)
    squares: list[float] = []
    for size in (1.0, 3.0, 0.5):
        squares.append(size**2)
        weights = 0.99 ** np.arange(len(squares))[::-1]
        expected = size / np.sqrt(np.average(squares, weights=weights))
        _, change = optimizer.change("item", np.array([0]), rows, np.full((1, 2), size, np.float32), 1.0)
        assert -change[0, 0] == pytest.approx(expected, rel=1e-4)


def test_it_keeps_eight_bytes_for_each_row() -> None:
    assert RowwiseAdam({"item": 1000, "user": 24}, weight_decay=0.0).state_bytes() == 8 * 1024
