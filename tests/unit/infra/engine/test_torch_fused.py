"""Rewritten for fewer kernels, a ranker computes what it computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from infra.engine.torch_fused import fewer_kernels
from infra.engine.torch_graph import module_of
from infra.release import Role
from tests.quantised_models import TOKEN, USER, exported
from tests.unit.infra.engine.test_cuda_capturable import run_on_fake_cuda

ROLES: tuple[Role, ...] = ("edge", "rerank")
PLAIN = {role: module_of(exported(role), role) for role in ROLES}
FUSED = {role: fewer_kernels(module_of(exported(role), role)) for role in ROLES}
# Operations that are a kernel each.
KERNELS = ("mm", "bmm", "addmm", "add", "mul", "sub", "div", "sum", "cat", "clone", "_softmax", "native_layer_norm")


def inputs(batch: int, length: int, candidates: int, token: int = TOKEN, user: int = USER) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(batch * length + candidates)
    shapes = ((batch, length, token), (batch, candidates, token), (batch, length), (batch, user))
    hist, target, mask, of_user = (torch.randn(shape, generator=random) for shape in shapes)
    return [hist, target, (mask > 0).float(), of_user]


@pytest.mark.parametrize("role", ROLES)
@given(batch=st.integers(1, 4), length=st.integers(1, 100), candidates=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_the_logits_are_the_same(role: Role, batch: int, length: int, candidates: int) -> None:
    given_inputs = inputs(batch, length, candidates)
    with torch.inference_mode():
        torch.testing.assert_close(FUSED[role](*given_inputs), PLAIN[role](*given_inputs), atol=1e-4, rtol=1e-4)


def test_attention_written_head_by_head_becomes_one_product_for_all_heads() -> None:
    def kernels(fused: bool) -> dict[str, int]:
        module = module_of(exported("rerank"), "rerank", half=True)
        _, found = run_on_fake_cuda(fewer_kernels(module) if fused else module)
        return {name: found[name] for name in KERNELS}

    before, after = kernels(fused=False), kernels(fused=True)
    assert (before["bmm"], after["bmm"]) == (8, 2)
    assert (before["_softmax"], after["_softmax"]) == (4, 1)
    assert after["addmm"] >= 8
    assert sum(after.values()) <= 0.6 * sum(before.values())


def head_model(nodes: list[onnx.NodeProto], width: int = 8, **constants: np.ndarray) -> onnx.ModelProto:
    """`target` split into two halves a and b; `nodes` make c and d of them, which are joined and summed."""
    node, value = helper.make_node, helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            node("Split", ["target"], ["a", "b"], axis=2, num_outputs=2),
            *nodes,
            node("Concat", ["c", "d"], ["joined"], axis=2),
            node("Mul", ["joined", "weights"], ["weighted"]),
            node("ReduceSum", ["weighted", "last"], ["logits"], keepdims=0),
        ],
        "heads",
        [
            value("target", TensorProto.FLOAT, ["batch", "candidates", width]),
            value("mask", TensorProto.FLOAT, ["batch", "length"]),
        ],
        [value("logits", TensorProto.FLOAT, ["batch", "candidates"])],
        [
            *(numpy_helper.from_array(array, name) for name, array in constants.items()),
            numpy_helper.from_array(np.arange(1, width + 1, dtype=np.float32), "weights"),
            numpy_helper.from_array(np.array([2]), "last"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


NODE = helper.make_node
HALF = np.arange(4, dtype=np.float32)
SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
# What is done to the halves, with which constants, and whether both can be made by one operation.
CASES: list[tuple[list[onnx.NodeProto], dict[str, np.ndarray], bool]] = [
    ([NODE("Relu", ["a"], ["c"]), NODE("Relu", ["b"], ["d"])], {}, True),
    ([NODE("Softmax", ["a"], ["c"], axis=-1), NODE("Softmax", ["b"], ["d"], axis=-1)], {}, True),
    ([NODE("Softmax", ["a"], ["c"], axis=1), NODE("Softmax", ["b"], ["d"], axis=1)], {}, True),
    ([NODE("Add", ["a", "half"], ["c"]), NODE("Add", ["b", "half"], ["d"])], {"half": HALF}, True),
    ([NODE("MatMul", ["a", "square"], ["c"]), NODE("MatMul", ["b", "square"], ["d"])], {"square": SQUARE}, True),
    # A shared input with more axes than a head has.
    (
        [
            NODE("ReduceSum", ["a", "axis0"], ["a0"], keepdims=0),
            NODE("ReduceSum", ["b", "axis0"], ["b0"], keepdims=0),
            NODE("Add", ["a0", "zeros"], ["c"]),
            NODE("Add", ["b0", "zeros"], ["d"]),
        ],
        {"axis0": np.array([0]), "zeros": np.zeros((3, 1, 1), np.float32)},
        True,
    ),
    ([NODE("LeakyRelu", ["a"], ["c"], alpha=0.1), NODE("LeakyRelu", ["b"], ["d"], alpha=0.2)], {}, False),
    ([NODE("Relu", ["a"], ["c"]), NODE("Tanh", ["b"], ["d"])], {}, False),
    ([NODE("Relu", ["b"], ["c"]), NODE("Relu", ["a"], ["d"])], {}, False),
    ([NODE("Sub", ["a", "b"], ["c"]), NODE("Sub", ["b", "a"], ["d"])], {}, False),
    ([NODE("Relu", ["a"], ["c"]), NODE("Relu", ["a"], ["d"])], {}, False),
]


@pytest.mark.parametrize(("nodes", "constants", "mergeable"), CASES)
def test_only_heads_that_are_made_alike_are_merged_and_every_other_graph_stays_right(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], mergeable: bool
) -> None:
    model = head_model(nodes, **constants)
    plain, fused = module_of(model, "heads"), fewer_kernels(module_of(model, "heads"))
    given_inputs = inputs(3, 2, 5, token=8, user=1)
    torch.testing.assert_close(fused(*given_inputs), plain(*given_inputs), atol=1e-4, rtol=1e-4)
    assert ("_together" in fused.code) == mergeable


def test_a_product_that_something_else_reads_too_keeps_its_addition_apart() -> None:
    nodes = [
        NODE("MatMul", ["a", "square"], ["product"]),
        NODE("Add", ["product", "half"], ["c"]),
        NODE("Mul", ["product", "b"], ["d"]),
    ]
    model = head_model(nodes, square=SQUARE, half=HALF)
    fused = fewer_kernels(module_of(model, "heads"))
    assert "_linear" not in fused.code
    given_inputs = inputs(2, 2, 3, token=8, user=1)
    torch.testing.assert_close(fused(*given_inputs), module_of(model, "heads")(*given_inputs), atol=1e-3, rtol=1e-4)
