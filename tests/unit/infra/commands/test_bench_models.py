"""`trirank bench models` on a tiny release: what can be opened is measured, what cannot is listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from feature_service.schema import FeatureSchema
from infra.commands import bench_models
from infra.commands.bench import app
from infra.commands.bench_models import GPU_PEER, PEER
from infra.errors import InvalidInput
from infra.release import Release, Role
from tests.tiny_release import write_tiny_release

QUICK = ("--seconds", "0.1", "--shapes", "1x3x5")


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_tiny_release(tmp_path / "r", int8=True)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def test_every_engine_that_agrees_is_measured_beside_the_peer(release: Release, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"

    done = run("--release", str(release.path), *QUICK, "--role", "rerank", "--json", "--plot", str(chart))

    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    engines = ["onnxruntime-cpu:int8", "onnxruntime-cpu:fp32", "torch-cpu:fp32"]
    assert [row["engine"] for row in report["rows"]] == [*engines, "PyTorch eager, paper's form"]
    assert report["rows"][-1]["times_faster"] == 1.0
    assert all(row["timing"]["p50_ms"] > 0 and row["shape"] == "1x3x5" for row in report["rows"])
    assert [one["engine"] for one in report["engines"]] == engines
    assert all(one["agreement"]["logit_rmse"] < 1e-5 for one in report["engines"])
    assert all(one["file_bytes"] > 0 and one["memory_bytes"] > 0 for one in report["engines"])
    assert report["unavailable"]["rerank aotinductor:fp32"].startswith("unavailable: ")
    assert all(name in chart.read_text() for name in engines)


def test_a_run_that_measures_no_engine_is_no_success(release: Release) -> None:
    done = run("--release", str(release.path), *QUICK, "--role", "edge", "--engines", "aotinductor")

    assert done.exit_code == 1
    assert "not measured: edge aotinductor:fp32: unavailable: " in done.stdout


@pytest.mark.parametrize(
    ("on_a_gpu", "peers"),
    [
        (["onnxruntime-cpu:fp32"], [GPU_PEER, PEER]),
        (["onnxruntime-cpu:int8", "onnxruntime-cpu:fp32"], [GPU_PEER]),
        ([], [PEER]),
    ],
)
def test_an_engine_on_a_gpu_is_compared_with_the_peer_on_that_gpu(
    release: Release, monkeypatch: pytest.MonkeyPatch, on_a_gpu: list[str], peers: list[str]
) -> None:
    devices = []

    def peer(_role: Role, _schema: FeatureSchema, _batch: object, device: str) -> Callable[[], object]:
        devices.append(device)
        return lambda: sum(range(200_000 if device == "cuda" else 200))

    monkeypatch.setattr(bench_models, "_peer", peer)
    monkeypatch.setattr(bench_models, "_has_cuda", lambda: True)
    monkeypatch.setattr(bench_models, "on_gpu", lambda names: names[0] in on_a_gpu)
    named = ["onnxruntime-cpu:int8", "onnxruntime-cpu:fp32"]

    done = run("--release", str(release.path), *QUICK, "--role", "rerank", "--engines", ",".join(named), "--json")

    assert done.exit_code == 0, done.output
    rows = {row["engine"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == [*named, *peers]
    assert devices == ["cuda" if one == GPU_PEER else "cpu" for one in peers]
    for name in named:
        measure, of = ("p50_ms", GPU_PEER) if name in on_a_gpu else ("cpu_p50_ms", PEER)
        ratio = rows[of]["timing"][measure] / rows[name]["timing"][measure]
        assert rows[name]["times_faster"] == pytest.approx(ratio)


def test_the_table_has_the_engines_that_were_named_and_no_others(release: Release) -> None:
    done = run("--release", str(release.path), *QUICK, "--role", "edge", "--engines", "onnxruntime-cpu:fp32")

    assert done.exit_code == 0, done.output
    assert "onnxruntime-cpu:fp32" in done.output
    assert "torch-cpu" not in done.output
    assert "rerank" not in done.output


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (("--engines", "onnx"), "engines"),
        (("--role", "recall"), "role"),
        (("--shapes", "1x50"), "shapes"),
        (("--shapes", "1x101x5"), "shapes"),
        (("--shapes", "0x50x5"), "shapes"),
        (("--plot", "chart.png"), "plot"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(release: Release, given: tuple[str, str], field: str) -> None:
    done = run("--release", str(release.path), *given)

    assert isinstance(done.exception, InvalidInput)
    assert done.exception.field == field
