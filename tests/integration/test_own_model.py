"""A model of one's own from training to a release; the example in the docs is run as written."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console

from infra.engine.precision import activations, tidied, to_int8
from infra.engine.precision_fp16 import to_fp16
from infra.engine.ranker_contract import ModelRefused
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import Release, read_release
from reranker.architectures import Architecture, rerank_architecture
from reranker.offline import scorer_of
from reranker.own import module_of
from reranker.recipe import Recipe
from reranker.replace import replace_models
from reranker.train import train_release
from tests.logs_of_events import small_dataset, write_folder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "infra" / "docs" / "bring_your_own_model.md"
QUIET = Console(file=io.StringIO())


def _block(name: str) -> str:
    found = re.search(rf"```python file={re.escape(name)}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found, f"no example {name} in {DOCS}"
    return found.group(1)


def _train(folder: Path, out: Path, rerank: Architecture) -> Release:
    recipe = replace(Recipe(), batch_size=32, rerank=rerank)
    return train_release(str(folder), out, cache=out.parent, seed=5, epochs=1, recipe=recipe, console=QUIET)


def _scores_as_recorded(release: Release) -> None:
    scorer = scorer_of(read_release(release.path))
    for request in release.requests():
        edge, rerank = scorer.score(request)
        np.testing.assert_allclose(edge, request.edge_logits, atol=1e-5)
        np.testing.assert_allclose(rerank, request.rerank_logits, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "small", small_dataset())


@pytest.fixture(scope="module")
def work(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's module and a release of shipped models, a DIN in the place of the BST."""
    work = tmp_path_factory.mktemp("own")
    (work / "my_rankers.py").write_text(_block("my_rankers.py"))
    _train(folder, work / "release", rerank_architecture("din"))
    return work


@pytest.fixture
def importable(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(work)
    monkeypatch.delitem(sys.modules, "my_rankers", raising=False)
    return work


def test_the_example_is_trained_with_the_tables_and_released(folder: Path, importable: Path, tmp_path: Path) -> None:
    release = _train(folder, tmp_path / "similar", rerank_architecture("my_rankers:Similar"))
    said = release.manifest.made_with["architectures"]
    assert said["rerank"] == {"name": "my_rankers:Similar", "blocks": None, "readout": None}
    assert said["edge"]["name"] == "mlp"
    assert release.manifest.report["recipe"]["rerank"]["name"] == "my_rankers:Similar"
    _scores_as_recorded(release)


def test_the_exported_example_takes_the_tables_of_a_release(folder: Path, work: Path) -> None:
    (work / "export.py").write_text(_block("export.py"))
    subprocess.run(
        [sys.executable, "export.py"],
        cwd=work,
        check=True,
        timeout=300,
        env={"PYTHONPATH": f"{ROOT}:{work}"},
    )
    source = read_release(work / "release")
    made = replace_models(
        source, str(folder), work / "similar-2", models={"rerank": str(work / "similar.pt2")}, cache=work, console=QUIET
    )
    mine, theirs = made.manifest, source.manifest
    assert mine.parent == theirs.name
    assert mine.generation != theirs.generation
    assert [t.fingerprint for t in mine.tables] == [t.fingerprint for t in theirs.tables]
    assert mine.files["edge/mlp.fp32.onnx"] == theirs.files["edge/mlp.fp32.onnx"]
    assert mine.files["rerank/bst.fp32.onnx"] != theirs.files["rerank/bst.fp32.onnx"]
    assert mine.made_with["architectures"]["rerank"]["name"].startswith("similar.pt2 sha256 ")
    assert mine.made_with["architectures"]["edge"] == theirs.made_with["architectures"]["edge"]
    differences = mine.report["compared_with"]["differences"]
    assert differences["edge"]["uniform"]["auc"]["difference"] == pytest.approx(0.0, abs=1e-4)
    assert differences["rerank"]["uniform"]["auc"]["difference"] != 0.0
    _scores_as_recorded(made)


def test_an_onnx_file_is_released_as_it_is(folder: Path, work: Path, tmp_path: Path) -> None:
    source = read_release(work / "release")
    file = source.rerank_model
    made = replace_models(
        source, str(folder), tmp_path / "same", models={"rerank": str(file)}, cache=work, console=QUIET
    )
    assert made.rerank_model.read_bytes() == file.read_bytes()
    differences = made.manifest.report["compared_with"]["differences"]
    for kind in ("uniform", "popularity"):
        assert differences["rerank"][kind]["auc"]["difference"] == pytest.approx(0.0, abs=1e-4)


def test_files_that_are_no_rankers_are_refused_and_nothing_is_written(
    folder: Path, importable: Path, tmp_path: Path
) -> None:
    from my_rankers import Similar  # type: ignore[import-not-found]

    source = read_release(importable / "release")
    inputs = (torch.randn(2, 5, 64), torch.randn(2, 7, 64), torch.ones(2, 5), torch.randn(2, 32))
    torch.export.save(torch.export.export(Similar(64, 32).eval(), inputs), tmp_path / "fixed.pt2")
    (tmp_path / "broken.pt2").write_bytes(b"PK nothing")
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    (tmp_path / "model.bin").write_bytes(b"")
    for name, error in (
        ("fixed.pt2", r"forward fails for hist f32\[3, 7, 64\]"),
        ("broken.pt2", "torch.export cannot load it"),
        ("broken.onnx", "ONNX Runtime cannot load it"),
        ("absent.pt2", "there is no such file"),
        ("model.bin", r"give a .pt2 \(torch.export.save\), an .onnx, or package.module:factory"),
    ):
        with pytest.raises(ModelRefused, match=error):
            replace_models(
                source, str(folder), tmp_path / "out", models={"rerank": str(tmp_path / name)}, cache=tmp_path
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("precision", "held"), [("fp16", "FLOAT16"), ("int8", "QuantizeLinear")])
def test_a_graph_of_a_lower_precision_is_refused(work: Path, tmp_path: Path, precision: str, held: str) -> None:
    fp32 = onnx.load(read_release(work / "release").rerank_model)
    lower = to_fp16(fp32) if precision == "fp16" else to_int8(fp32, dict.fromkeys(activations(tidied(fp32)), 0.01))
    onnx.save(lower, tmp_path / "lower.onnx")
    with pytest.raises(ModelRefused, match=f"it holds {held}; give the FP32 model"):
        module_of(tmp_path / "lower.onnx")


def test_other_data_no_model_and_a_taken_place_are_refused(work: Path, tmp_path: Path) -> None:
    source = read_release(work / "release")
    other = write_folder(tmp_path / "other", small_dataset(seed=1))
    models = {"rerank": str(source.rerank_model)}
    with pytest.raises(InvalidInput, match="data: release release was not made from"):
        replace_models(source, str(other), tmp_path / "out", models=models, cache=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="rerank: no model is given"):
        replace_models(source, str(other), tmp_path / "out", models={}, cache=tmp_path)
    with pytest.raises(ReleaseRefused, match="exists already"):
        replace_models(source, str(other), source.path, models=models, cache=tmp_path)  # type: ignore[arg-type]


def test_a_din_is_trained_and_released_like_the_bst(work: Path) -> None:
    release = read_release(work / "release")
    assert release.manifest.made_with["architectures"]["rerank"]["name"] == "din"
    assert release.manifest.models["rerank"]["fp32"] == "rerank/bst.fp32.onnx"
    _scores_as_recorded(release)
