"""Calibration: predicted against observed shares."""

from __future__ import annotations

import numpy as np
import pytest

from edge_ranker.calibration import BINS, calibration


def _drawn(n: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of taken and other candidates whose true logit is `shift` lower than they say."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1.5, n).astype(np.float32)
    taken = rng.random(n) < 1 / (1 + np.exp(-(logits - shift)))
    return logits[taken], logits[~taken]


def test_logits_that_mean_what_they_say_have_no_error() -> None:
    positive, negative = _drawn(200_000, 0.0)
    n = negative.size // positive.size
    negative = negative[: n * positive.size].reshape(positive.size, n)
    found = calibration(positive, [(negative, float(n))])
    assert found.error < 0.02
    assert found.predicted.size == BINS
    np.testing.assert_allclose(found.share, 1 / BINS, atol=0.001)
    assert (np.diff(found.predicted) > 0).all()


def test_logits_that_say_too_much_are_found_out() -> None:
    positive, negative = _drawn(200_000, 1.0)
    n = negative.size // positive.size
    negative = negative[: n * positive.size].reshape(positive.size, n)
    found = calibration(positive, [(negative, float(n))])
    assert found.error > 0.1
    assert (found.predicted > found.observed).mean() > 0.9


def test_negatives_weigh_what_they_are_told_to() -> None:
    positive, negative = np.zeros(10, np.float32), np.zeros((10, 50), np.float32)
    one = calibration(positive, [(negative, 1.0)])
    assert float((one.share * one.observed).sum()) == pytest.approx(1 / 2)
    mixed = calibration(positive, [(negative, 2.0), (negative[:, :5], 2.0)])
    assert float((mixed.share * mixed.observed).sum()) == pytest.approx(1 / 5)
    assert mixed.as_dict()["error"] == pytest.approx(mixed.error, abs=1e-5)
