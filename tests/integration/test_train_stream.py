"""Training from Parquet in parts gives the release that training in memory gives."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from infra.errors import InvalidInput
from infra.release import Release
from reranker.checkpoint import Draft
from reranker.recipe import Recipe
from reranker.train import train_release
from tests.logs_of_events import small_dataset, write_folder

RECIPE = replace(Recipe(), batch_size=32)


def _train(folder: Path, out: Path, **more: object) -> Release:
    quiet = Console(file=io.StringIO())
    return train_release(
        str(folder),
        out,
        cache=out.parent,
        seed=5,
        epochs=1,
        console=quiet,
        **{"recipe": RECIPE, **more},  # type: ignore[arg-type]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "small", small_dataset())
    log = pl.read_csv(folder / "interactions.csv")
    (folder / "interactions.csv").unlink()
    log.write_parquet(folder / "interactions.parquet")
    return folder


def test_a_streamed_training_is_the_training_in_memory(folder: Path, tmp_path: Path) -> None:
    in_memory = _train(folder, tmp_path / "in-memory")
    streamed = _train(folder, tmp_path / "streamed", stream=True)
    for table in in_memory.manifest.tables:
        np.testing.assert_array_equal(streamed.table(table.name).rows, in_memory.table(table.name).rows)
        np.testing.assert_array_equal(streamed.table(table.name).keys, in_memory.table(table.name).keys)
    for file in ("edge/mlp.fp32.onnx", "rerank/bst.fp32.onnx"):
        assert streamed.manifest.files[file] == in_memory.manifest.files[file]
    assert streamed.manifest.schema == in_memory.manifest.schema
    assert streamed.catalogue() == in_memory.catalogue()
    assert streamed.users() == in_memory.users()
    ours, theirs = streamed.manifest.report, in_memory.manifest.report
    assert ours["data_fingerprint"] == theirs["data_fingerprint"]
    drawn = "ranked_items_without_row"
    assert {**ours["split"], drawn: 0} == {**theirs["split"], drawn: 0}
    for model in ("edge", "rerank"):
        assert abs(ours["models"][model]["uniform"]["auc"] - theirs["models"][model]["uniform"]["auc"]) < 0.05
    assert not Draft(streamed.path).path.exists()


def test_what_cannot_be_streamed_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="stream: movielens-100k is no folder"):
        _train(Path("movielens-100k"), tmp_path / "out", stream=True)
    with pytest.raises(InvalidInput, match="the log has 1 parts to share among 2; give fewer"):
        _train(folder, tmp_path / "out", stream=True, recipe=replace(RECIPE, workers=2))
    assert not Draft(tmp_path / "out").path.exists()
