"""The ONNX file of a ranker, computed by PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from infra.engine.batch import Features
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import EngineUnavailable
from infra.engine.torch_graph import module_of, read_module
from infra.engine.torch_operators import OPERATORS
from infra.errors import ReleaseRefused
from infra.release import Role
from tests.gpu_release import models
from tests.onnx_models import write_ranker
from tests.quantised_models import TOKEN, USER, exported

ROLES: tuple[Role, ...] = ("edge", "rerank")
ENGINES = {role: OnnxEngine(models()[role]["fp32"]) for role in ROLES}
MODULES = {role: read_module(models()[role]["fp32"]) for role in ROLES}


def some(batch: int, length: int, candidates: int, token: int = TOKEN, user: int = USER, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    mask = (random.random((batch, length)) < 0.7).astype(np.float32)
    return Features(normal(batch, length, token), normal(batch, candidates, token), mask, normal(batch, user))


@torch.inference_mode()
def run(module: torch.nn.Module, of: Features, kind: torch.dtype = torch.float32) -> np.ndarray:
    inputs = (torch.from_numpy(x).to(kind) for x in (of.hist, of.target, of.mask, of.user))
    logits: torch.Tensor = module(*inputs)
    assert logits.dtype == kind
    return logits.float().numpy()


@pytest.mark.parametrize("role", ROLES)
@given(batch=st.integers(1, 4), length=st.integers(1, 100), candidates=st.integers(1, 60), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_logits_are_onnx_runtimes_for_every_shape(
    role: Role, batch: int, length: int, candidates: int, seed: int
) -> None:
    features = some(batch, length, candidates, seed=seed)
    expected = ENGINES[role].run(features.hist, features.target, features.mask, features.user)
    np.testing.assert_allclose(run(MODULES[role], features), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("role", ROLES)
def test_half_precision_stays_near_and_finite_with_an_empty_history(role: Role) -> None:
    features = some(2, 20, 30)
    features.mask[0] = 0.0
    logits = run(read_module(models()[role]["fp32"], half=True), features, torch.float16)
    exact = run(MODULES[role], features)
    assert np.isfinite(logits).all()
    assert np.abs(logits - exact).max() < 0.05 * max(1.0, float(np.abs(exact).max()))
    assert not np.array_equal(logits, exact)


def test_rankers_of_an_older_opset_run_too(tmp_path: Path) -> None:
    file = write_ranker(tmp_path / "ranker.onnx", 8, 4, poison=True)
    features = some(2, 5, 7, token=8, user=4)
    expected = OnnxEngine(file).run(features.hist, features.target, features.mask, features.user)
    np.testing.assert_allclose(run(read_module(file), features), expected, atol=1e-5)
    features.target[1, 3, 0] = 101.0
    assert np.argwhere(np.isnan(run(read_module(file), features))).tolist() == [[1, 3]]


@pytest.mark.parametrize("role", ROLES)
def test_the_module_can_be_exported_with_free_axes(role: Role) -> None:
    batch, length, candidates = (torch.export.Dim(name) for name in ("batch", "length", "candidates"))
    shapes = ({0: batch, 1: length}, {0: batch, 1: candidates}, {0: batch, 1: length}, {0: batch})
    example = some(2, 5, 7)
    inputs = tuple(torch.from_numpy(x) for x in (example.hist, example.target, example.mask, example.user))
    program = torch.export.export(MODULES[role], inputs, dynamic_shapes=shapes)
    other = some(3, 11, 13)
    np.testing.assert_allclose(run(program.module(), other), run(MODULES[role], other), atol=1e-5)


def unary(op_type: str, constants: dict[str, np.ndarray], **attributes: object) -> onnx.ModelProto:
    """A ranker that is one operator on `target` and then a sum over its last axis."""
    node, value = helper.make_node, helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            node(op_type, ["target", *constants], ["made"], **attributes),
            node("ReduceSum", ["made", "last"], ["logits"], keepdims=0),
        ],
        "unary",
        [value("target", TensorProto.FLOAT, ["batch", "candidates", 6])],
        [value("logits", TensorProto.FLOAT, ["batch", "candidates"])],
        [
            *(numpy_helper.from_array(array, name) for name, array in constants.items()),
            numpy_helper.from_array(np.array([2]), "last"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


SLOPE = np.full(6, 0.3, np.float32)
CASES: list[tuple[str, dict[str, np.ndarray], dict[str, object]]] = [
    ("Neg", {}, {}),
    ("Tanh", {}, {}),
    ("Sigmoid", {}, {}),
    ("Exp", {}, {}),
    ("Gelu", {}, {}),
    ("Gelu", {}, {"approximate": "tanh"}),
    ("LeakyRelu", {}, {"alpha": 0.2}),
    ("PRelu", {"slope": SLOPE}, {}),
    ("Pow", {"two": np.array(2.0, np.float32)}, {}),
    ("Softmax", {}, {"axis": -1}),
    ("Clip", {"least": np.array(-0.5, np.float32), "most": np.array(0.5, np.float32)}, {}),
    ("ReduceMean", {"axes": np.array([2])}, {"keepdims": 1}),
    ("ReduceMax", {"axes": np.array([-1])}, {"keepdims": 1}),
    ("LayerNormalization", {"scale": SLOPE, "shift": SLOPE}, {"axis": -1, "epsilon": 1e-3}),
    ("Reshape", {"shape": np.array([0, 0, -1])}, {}),
    ("Expand", {"shape": np.array([1, 1, 6])}, {}),
    ("Expand", {"shape": np.array([1])}, {}),
    ("CumSum", {"axis": np.array(2)}, {}),
    ("Slice", {"starts": np.array([-4]), "ends": np.array([2**62]), "axes": np.array([-1])}, {}),
    ("Slice", {"starts": np.array([0]), "ends": np.array([6]), "axes": np.array([2]), "steps": np.array([2])}, {}),
    ("Gather", {"at": np.array([3, 1])}, {"axis": 2}),
    ("Transpose", {}, {"perm": [0, 1, 2]}),
]


@pytest.mark.parametrize(("op_type", "constants", "attributes"), CASES)
def test_an_operator_means_what_onnx_runtime_means(
    tmp_path: Path, op_type: str, constants: dict[str, np.ndarray], attributes: dict[str, object]
) -> None:
    model = unary(op_type, constants, **attributes)
    onnx.save(model, tmp_path / "one.onnx")
    features = some(2, 3, 5, token=6)
    expected = OnnxEngine(tmp_path / "one.onnx").run(features.hist, features.target, features.mask, features.user)
    np.testing.assert_allclose(run(module_of(model, "one"), features), expected, atol=1e-5)


def test_an_operator_that_is_not_known_is_refused_by_name() -> None:
    assert "Cosh" not in OPERATORS
    with pytest.raises(ReleaseRefused, match="one: PyTorch engines do not know the operator Cosh"):
        module_of(unary("Cosh", {}), "one")


def test_inputs_that_are_no_rankers_are_refused() -> None:
    other = onnx.ModelProto()
    other.CopyFrom(exported("edge"))
    other.graph.input[0].name = "image"
    with pytest.raises(ReleaseRefused, match="image"):
        module_of(other, "one")


def test_a_missing_file_is_unavailable_and_a_broken_one_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no such file"):
        read_module(tmp_path / "none.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(ReleaseRefused, match="no ONNX model"):
        read_module(tmp_path / "broken.onnx")
