"""Scales follow from what real requests do inside the model, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.engine.batch import Features
from infra.engine.calibrate import (
    METHODS,
    N_BINS,
    Magnitudes,
    Method,
    Scales,
    calibrate,
    magnitudes,
    read_scales,
    threshold,
)
from infra.engine.precision import activations, tidied, to_int8
from infra.errors import InvalidInput, ReleaseRefused
from tests.quantised_models import exported, plain, requests


def make(batches: list[Features], method: Method = "percentile") -> Scales:
    return calibrate(plain(), batches, role="edge", method=method, calibration={"requests": 8})


@pytest.mark.parametrize("role", ["edge", "rerank"])
@pytest.mark.parametrize("method", METHODS)
def test_scales_fit_the_graph_they_were_made_for(role: str, method: Method) -> None:
    scales = calibrate(exported(role), requests(3, 7), role=role, method=method, calibration={})
    assert list(scales.steps) == activations(tidied(exported(role)))
    to_int8(exported(role), scales.steps)
    for name, step in scales.steps.items():
        assert 0 < step * 127 <= scales.largest[name] * 1.002


def test_min_max_reaches_the_largest_value_of_any_batch() -> None:
    batches = requests(3, 7)
    batches[1].target[2, 5, 9] = -40.0
    scales = make(batches, "min-max")
    assert scales.largest["target"] == 40.0
    assert scales.steps["target"] * 127 == pytest.approx(40.0, rel=2e-3)


def test_one_outlier_in_ten_thousand_and_more_is_clipped_by_the_percentile() -> None:
    batches = requests(3, 7, n=8, candidates=50)
    batches[1].target[2, 5, 9] = -40.0
    assert make(batches, "percentile").steps["target"] * 127 < 5.0


def test_batches_make_no_difference() -> None:
    (one,) = requests(5, n=6)
    split = [Features(*(part[i : i + 2] for part in (one.hist, one.target, one.mask, one.user))) for i in (0, 2, 4)]
    for method in METHODS:
        whole, parts = make([one], method), make(split, method)
        assert parts.steps == pytest.approx(whole.steps, rel=1e-3)


def test_exact_zeros_do_not_shift_the_percentile() -> None:
    values = requests(3, n=2)
    more = [Features(b.hist, np.concatenate((b.target, np.zeros_like(b.target)), 1), b.mask, b.user) for b in values]
    assert make(more).steps["target"] == make(values).steps["target"]


@pytest.mark.parametrize("batches", [[], requests(3, candidates=0), requests(3, n=0)])
def test_an_empty_calibration_set_is_refused(batches: list[Features]) -> None:
    with pytest.raises(ReleaseRefused, match="holds no request with a candidate"):
        make(batches)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_calibration_data_that_is_not_finite_is_refused(bad: float) -> None:
    batches = requests(3, 4)
    batches[1].user[0, 0] = bad
    with pytest.raises(ReleaseRefused, match="user is not finite on a calibration request"):
        make(batches)


def test_an_activation_that_is_always_zero_is_refused() -> None:
    batches = requests(3)
    batches[0].target[:] = 0
    with pytest.raises(ReleaseRefused, match="target is zero on every calibration request"):
        make(batches)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidInput, match="calibration_method"):
        make(requests(3), "median")  # type: ignore[arg-type]


def test_entropy_clips_a_long_thin_tail_and_keeps_an_even_spread() -> None:
    random = np.random.default_rng(0)
    tail = np.histogram(np.abs(np.append(random.normal(0, 1, 200_000), 60.0)), N_BINS, (0, 60))[0]
    assert threshold(Magnitudes(60.0, tail), "entropy") < 12
    even = np.full(N_BINS, 100)
    assert threshold(Magnitudes(60.0, even), "entropy") == 60.0


@settings(max_examples=15)
@given(st.lists(st.integers(0, 1000), min_size=N_BINS // 64, max_size=N_BINS // 64).filter(any))
def test_no_method_reaches_beyond_the_largest_value_and_the_percentile_holds_its_share(coarse: list[int]) -> None:
    counts = np.repeat(np.array(coarse), 64)
    seen = Magnitudes(2.0, counts)
    for method in METHODS:
        assert 0 < threshold(seen, method) <= 2.0
    inside = counts[: round(threshold(seen, "percentile") / 2.0 * N_BINS)].sum()
    assert inside >= 0.9999 * counts.sum()


def test_magnitudes_count_every_value_that_is_not_zero() -> None:
    batches = requests(3, 4)
    seen = magnitudes(plain(), batches)
    assert seen["target"].counts.sum() == sum(b.target.size for b in batches)


def test_scales_are_read_back_and_damaged_ones_refused(tmp_path: Path) -> None:
    scales, file = make(requests(3)), tmp_path / "scales.json"
    scales.write(file)
    assert read_scales(file) == scales
    file.write_text(file.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(InvalidInput, match="format 9, this version reads 1"):
        read_scales(file)
    file.write_text("{}")
    with pytest.raises(InvalidInput, match="holds no scales"):
        read_scales(file)
    with pytest.raises(InvalidInput, match="No such file"):
        read_scales(tmp_path / "none.json")
