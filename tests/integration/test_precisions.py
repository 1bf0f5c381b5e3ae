"""One command makes a release of a user's own CSV files, with every precision that keeps its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner, Result

from edge_ranker.recorded import recorded_inputs
from infra.cli import app
from infra.engine.calibrate import read_scales
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.precision_fp16 import float32_products
from infra.errors import InvalidInput
from infra.release import PRECISIONS, ROLES, Release, read_release
from tests.logs_of_events import small_dataset, write_folder

# Few events of few users: limits that a model of a few hundred samples keeps.
LIMITS = {"LOGIT_RMSE_INT8": "0.5", "LOG_LOSS_RISE_PCT_INT8": "5"}


@pytest.fixture(scope="module")
def settings() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIMITS.items():
            patch.setenv(f"TRIRANK_PRECISION_MAX_{name}", value)
        patch.setenv("TRIRANK_PRECISION_MIN_OVERLAP_AT_20_FP16", "0.9")
        patch.setenv("TRIRANK_PRECISION_MIN_OVERLAP_AT_20_INT8", "0.8")
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "small", small_dataset())


def train(folder: Path, out: Path, *more: str) -> Result:
    command = ["train", "--data", str(folder), "--out", str(out), "--epochs", "4", "--batch-size", "32", "--amp", "off"]
    return CliRunner().invoke(app, [*command, "--home", str(out.parent), *more])


@pytest.fixture(scope="module")
def release(folder: Path, settings: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Release:
    out = tmp_path_factory.mktemp("releases") / "own"
    done = train(folder, out)
    assert done.exit_code == 0, done.output
    return read_release(out)


def test_the_release_holds_every_precision_of_both_rankers(release: Release) -> None:
    for role in ROLES:
        for precision in PRECISIONS:
            entry = release.manifest.report["precisions"][role][precision]
            assert entry["released"], entry
            model = release.model(role, precision)
            assert model is not None
            assert model.stat().st_size == entry["bytes"]
        assert read_scales(release.scales(role)).role == role  # type: ignore[arg-type]


def test_the_recorded_requests_get_nearly_the_same_scores_in_every_precision(release: Release) -> None:
    for role in ROLES:
        for precision, atol in (("fp32", 1e-4), ("fp16", 0.05), ("int8", 1.0), ("int8-cpu", 1.0)):
            engine = OnnxEngine(release.model(role, precision))  # type: ignore[arg-type]
            for one in recorded_inputs(release)[:20]:
                inputs = one.inputs
                got = engine.run(inputs.hist[None], inputs.target[None], inputs.mask[None], inputs.user[None])[0]
                expected = one.edge_logits if role == "edge" else one.rerank_logits
                np.testing.assert_allclose(got, expected, atol=atol)


def test_what_goes_to_gpus_multiplies_in_half_precision_or_int8(release: Release) -> None:
    for role in ROLES:
        for precision in ("fp16", "int8"):
            assert float32_products(onnx.load(release.model(role, precision))) == []  # type: ignore[arg-type]


def test_the_report_says_what_was_calibrated_on_and_it_is_not_the_test_period(release: Release) -> None:
    report = release.manifest.report
    calibration = report["precisions"]["calibration"]
    assert 0 < calibration["requests"] <= 256
    assert calibration["until"] < report["split"]["test_from"]
    assert calibration["data_fingerprint"] == report["data_fingerprint"]
    assert calibration["methods"] == {"edge": "percentile 99.99", "rerank": "percentile 99.99"}
    assert read_scales(release.scales("edge")).calibration["requests"] == calibration["requests"]  # type: ignore[arg-type]
    compared = report["precisions"]["rerank"]["int8"]
    assert 0 < compared["requests"] <= report["n_test_events"]
    assert set(compared["by_negatives"]) == {"uniform", "popularity"}


def test_what_is_over_its_limit_is_left_out_with_the_reason_and_given_scales_are_used(
    folder: Path, release: Release, settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scales = json.loads(release.scales("edge").read_text())  # type: ignore[union-attr]
    given = tmp_path / "given.json"
    given.write_text(json.dumps({**scales, "method": "by hand"}))
    out = tmp_path / "strict"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIRANK_PRECISION_MAX_LOGIT_RMSE_INT8", "0")
        done = train(folder, out, "--epochs", "1", "--scales", str(given))
    assert done.exit_code == 0, done.output
    again = read_release(out)
    methods = again.manifest.report["precisions"]["calibration"]["methods"]
    assert methods == {"edge": "by hand", "rerank": "percentile 99.99"}
    for role in ROLES:
        assert again.model(role, "int8") is None
        assert again.model(role, "fp16") is not None
        assert not list(out.glob("*/*int8*"))
        assert again.scales(role) is None
        reasons = again.manifest.report["precisions"][role]["int8"]["refused"]
        assert any("logits move by" in reason and "more than 0" in reason for reason in reasons)
        assert f"{role} int8 is not released: " in done.output
    shown = CliRunner().invoke(app, ["release", "show", str(out)])
    assert "edge int8 is not released: " in shown.output


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{}", "holds no scales"), (None, "No such file"), ('{"role": "user"}', "holds no scales")],
)
def test_a_file_that_holds_no_scales_is_refused_before_training(
    folder: Path, tmp_path: Path, content: str | None, reason: str
) -> None:
    file = tmp_path / "scales.json"
    if content is not None:
        file.write_text(content)
    done = train(folder, tmp_path / "none", "--scales", str(file))
    assert isinstance(done.exception, InvalidInput)
    assert reason in str(done.exception)
    assert not (tmp_path / "none").exists()


def test_two_files_of_scales_for_one_ranker_are_refused(folder: Path, release: Release, tmp_path: Path) -> None:
    file = str(release.scales("edge"))
    done = train(folder, tmp_path / "none", "--scales", file, "--scales", file)
    assert "the second file of scales of edge" in str(done.exception)
