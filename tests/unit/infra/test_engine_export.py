"""Exported graphs compute what PyTorch computes, on shapes they have not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_ranker.model import EdgeMLP
from infra.engine.export import OPSET, RANGES, SHAPES, export_ranker
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import INPUT_NAMES
from infra.errors import ReleaseRefused
from reranker.model import BST

TOKEN, USER = 64, 32


@pytest.mark.parametrize("make", [EdgeMLP, BST])
def test_a_ranker_is_exported_with_free_batch_length_and_candidates(tmp_path: Path, make: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model = make(TOKEN, USER)
    path = tmp_path / "ranker.onnx"
    assert export_ranker(model, path, token_dim=TOKEN, user_dim=USER) <= 1e-4
    graph = onnx.load(path)
    assert graph.opset_import[0].version == OPSET
    assert [i.name for i in graph.graph.input] == list(INPUT_NAMES)
    assert not (tmp_path / "ranker.onnx.data").exists()
    inputs = torch.randn(5, 13, TOKEN), torch.randn(5, 17, TOKEN), torch.ones(5, 13), torch.randn(5, USER)
    with torch.no_grad():
        expected = model(*inputs).numpy()
    np.testing.assert_allclose(OnnxEngine(path).run(*(x.numpy() for x in inputs)), expected, atol=1e-5)


def test_rounding_may_grow_with_the_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = EdgeMLP(TOKEN, USER)
    with torch.no_grad():
        model.out.weight.mul_(1e4)
    assert export_ranker(model, tmp_path / "large.onnx", token_dim=TOKEN, user_dim=USER) <= 1e-4


class _Shifting(nn.Module):
    """A ranker whose traced form differs: it adds a number that is fixed when it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0.0

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        self.calls += 1.0
        pooled = (hist * mask.unsqueeze(2)).sum(1).sum(1, keepdim=True) + user.sum(1, keepdim=True)
        return target.sum(2) + pooled + self.calls


def test_an_export_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="the model's logits differ from PyTorch's by"):
        export_ranker(_Shifting(), tmp_path / "shifting.onnx", token_dim=TOKEN, user_dim=USER)


def test_the_shapes_an_export_is_checked_on_reach_both_ends_of_every_range() -> None:
    assert RANGES["length"] == (1, 100)
    assert RANGES["candidates"] == (1, 512)
    for axis, (name, ends) in enumerate(RANGES.items()):
        sizes = [shape[axis] for shape in SHAPES]
        assert (min(sizes), max(sizes)) == ends, name


def test_an_exported_file_carries_no_stack_traces(tmp_path: Path) -> None:
    path = tmp_path / "ranker.onnx"
    export_ranker(EdgeMLP(TOKEN, USER), path, token_dim=TOKEN, user_dim=USER)
    assert not any(node.metadata_props for node in onnx.load(path).graph.node)
    assert b"edge_ranker" not in path.read_bytes()
