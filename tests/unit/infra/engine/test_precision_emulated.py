"""The emulated FP16 graph rounds where FP16 rounds, and overflows where FP16 overflows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from infra.engine.precision import activations, tidied, to_int8
from infra.engine.precision_emulated import emulated
from infra.engine.precision_fp16 import float32_products, to_fp16
from tests.quantised_models import exported, requests, run


def _elementwise() -> onnx.ModelProto:
    """((x * 1.1 + 3.3) - 0.7) / 1.3, and 30,000 added and taken away again."""
    node = helper.make_node
    names = {"a": 1.1, "b": 3.3, "c": 0.7, "d": 1.3, "large": 3e4}
    kinds = [("Mul", "a"), ("Add", "b"), ("Sub", "c"), ("Div", "d"), ("Add", "large"), ("Sub", "large")]
    tensors = ["target", "t1", "t2", "t3", "t4", "t5", "logits"]
    nodes = [node(k, [tensors[i], other], [tensors[i + 1]]) for i, (k, other) in enumerate(kinds)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("target", TensorProto.FLOAT, ["N"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in names.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _run(model: onnx.ModelProto, target: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits: np.ndarray = session.run(None, {"target": target})[0]
    return logits


def test_every_result_is_the_number_that_half_precision_gives() -> None:
    target = np.random.default_rng(0).normal(0, 50, 1000).astype(np.float32)
    half = target.astype(np.float16)
    a, b, c, d, large = (np.float16(value) for value in (1.1, 3.3, 0.7, 1.3, 3e4))
    expected = ((((half * a + b) - c) / d) + large) - large
    np.testing.assert_array_equal(_run(emulated(to_fp16(_elementwise())), target), expected.astype(np.float32))


def test_what_overflows_in_half_precision_is_infinite() -> None:
    with np.errstate(over="ignore"):
        assert np.isinf(_run(emulated(to_fp16(_elementwise())), np.array([4.5e4], np.float32))).all()


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_the_rankers_are_close_to_fp32_and_not_the_same(tmp_path: Path, role: str) -> None:
    model = exported(role)
    (batch,) = requests(20)
    expected = run(model, batch, tmp_path)
    for converted in (to_fp16(model), to_fp16(to_int8(model, dict.fromkeys(activations(tidied(model)), 0.04)))):
        measured = emulated(converted)
        assert len(float32_products(measured)) == sum(n.op_type in ("MatMul", "Gemm") for n in measured.graph.node)
        difference = np.abs(run(measured, batch, tmp_path) - expected).max()
        assert 1e-5 < difference < 0.05
