"""A training that is killed goes on where it stood and ends as if nothing had happened."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from infra.errors import InvalidInput, ReleaseRefused
from reranker.checkpoint import Draft
from reranker.train import train_release
from tests.integration.train_process import RECIPE, train
from tests.logs_of_events import small_dataset, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "small", small_dataset(n_events=300))


def test_a_killed_training_goes_on_and_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    undisturbed = train(folder, tmp_path / "undisturbed", resume=True, said=said)
    assert f"no checkpoint in {Draft(undisturbed.path).path}: training from the start" in said.getvalue()
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.integration.train_process", str(folder), str(out), "6"]
    killed = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not out.exists()
    assert (Draft(out).path / "checkpoint.tmp").exists()
    with pytest.raises(ReleaseRefused, match=r"recipe\.batch_size was 32, is 16"):
        train_release(
            str(folder),
            out,
            cache=tmp_path,
            seed=5,
            recipe=replace(RECIPE, batch_size=16),
            resume=True,
            console=Console(file=io.StringIO()),
        )
    said = io.StringIO()
    resumed = train(folder, out, resume=True, compare_with=undisturbed.path, plots=tmp_path / "plots", said=said)
    assert f"going on with the unfinished training in {Draft(out).path}" in said.getvalue()
    for table in undisturbed.manifest.tables:
        np.testing.assert_array_equal(resumed.table(table.name).rows, undisturbed.table(table.name).rows)
    for file in ("edge/mlp.fp32.onnx", "rerank/bst.fp32.onnx", "requests.msgpack"):
        assert resumed.manifest.files[file] == undisturbed.manifest.files[file], file
    assert resumed.manifest.report["models"] == undisturbed.manifest.report["models"]
    assert not Draft(out).path.exists()
    compared = resumed.manifest.report["compared_with"]
    assert compared["release"] == "undisturbed"
    for kinds in compared["differences"].values():
        for measures in kinds.values():
            assert set(measures) == {"auc", "gauc", "ndcg_at_10"}
            assert all(abs(d["difference"]) < 1e-3 and d["low"] <= 0 <= d["high"] for d in measures.values())
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "calibration.svg", "passes.svg", "segments.svg", "differences.svg"
    }  # fmt: skip


def test_few_items_cannot_be_sparse(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="sparse: with 30 items the recall loss touches every row"):
        train_release(
            str(folder), tmp_path / "new", cache=tmp_path, seed=5, recipe=replace(RECIPE, sparse="item"),
            console=Console(file=io.StringIO()),
        )  # fmt: skip


def test_there_has_to_be_a_release_to_compare_with(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="is no release directory"):
        train(folder, tmp_path / "new", compare_with=tmp_path / "none")
