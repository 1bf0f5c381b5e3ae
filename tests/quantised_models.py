"""Exported rankers with random weights, and batches of random requests, for tests of precisions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from edge_ranker.model import EdgeMLP
from infra.engine.batch import Features
from infra.engine.export import export_ranker
from reranker.model import BST

TOKEN, USER = 64, 32
MAKERS = {"edge": EdgeMLP, "rerank": BST}


@cache
def exported(role: str) -> onnx.ModelProto:
    """The role's own architecture with random weights, as training exports it. Do not change it: it is shared."""
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        torch.manual_seed(3)
        file = Path(folder) / "ranker.onnx"
        export_ranker(MAKERS[role](TOKEN, USER), file, token_dim=TOKEN, user_dim=USER)
        return onnx.load(file)


@cache
def plain() -> onnx.ModelProto:
    """A ranker with known names: activations `target`, `user` and `relu` are quantised, `relu_1` feeds the output."""
    random, node, value = np.random.default_rng(1), helper.make_node, helper.make_tensor_value_info
    shapes = {"first": (TOKEN, 32), "side": (32, USER), "second": (32, 16), "out": (16, 1)}
    weights = {name: random.standard_normal(shape).astype(np.float32) / 6 for name, shape in shapes.items()}
    nodes = [
        node("MatMul", ["target", "first"], ["own"]),
        node("Gemm", ["user", "side"], ["of_user"], transB=1),
        node("Unsqueeze", ["of_user", "axis1"], ["shared"]),
        node("Add", ["own", "shared"], ["added"]),
        node("Relu", ["added"], ["relu"]),
        node("MatMul", ["relu", "second"], ["narrow"]),
        node("Relu", ["narrow"], ["relu_1"]),
        node("MatMul", ["relu_1", "out"], ["last"]),
        node("Squeeze", ["last", "axis2"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "plain",
        [
            value("target", TensorProto.FLOAT, ["batch", "candidates", TOKEN]),
            value("user", TensorProto.FLOAT, ["batch", USER]),
        ],
        [value("logits", TensorProto.FLOAT, ["batch", "candidates"])],
        [
            *(numpy_helper.from_array(weight, name) for name, weight in weights.items()),
            *(numpy_helper.from_array(np.array([axis]), f"axis{axis}") for axis in (1, 2)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def requests(*lengths: int, n: int = 4, candidates: int = 11, seed: int = 0) -> list[Features]:
    """One batch of `n` requests per history length."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return [
        Features(
            normal(n, length, TOKEN), normal(n, candidates, TOKEN), np.ones((n, length), np.float32), normal(n, USER)
        )
        for length in lengths
    ]


def run(model: onnx.ModelProto, batch: Features, folder: Path) -> np.ndarray:
    """Logits of one batch."""
    from infra.engine.onnx_cpu import OnnxEngine

    file = folder / "run.onnx"
    onnx.save(model, file)
    return OnnxEngine(file).run(batch.hist, batch.target, batch.mask, batch.user)
