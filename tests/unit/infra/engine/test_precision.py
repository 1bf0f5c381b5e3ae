"""What INT8 touches in a graph, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from infra.engine.precision import (
    LEVELS,
    activations,
    as_fp16_scale,
    products_to_quantise,
    quantise_weight,
    tidied,
    to_int8,
)
from infra.engine.precision_fp16 import float32_products, to_fp16
from infra.errors import ReleaseRefused
from tests.quantised_models import exported, plain, requests, run

ROLES = ("edge", "rerank")
FORBIDDEN = {"Softmax", "LayerNormalization", "Gather", "Add", "Mul", "Concat", "Split", "ReduceSum"}


def scales(model: onnx.ModelProto, step: float = 0.04) -> dict[str, float]:
    return dict.fromkeys(activations(tidied(model)), step)


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm")]


@pytest.mark.parametrize("role", ROLES)
def test_every_dequantised_tensor_goes_into_a_product_and_nowhere_else(role: str) -> None:
    graph = to_int8(exported(role), scales(exported(role))).graph
    dequantised = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    readers = {n.op_type for n in graph.node if dequantised & set(n.input)}
    assert readers <= {"MatMul", "Gemm"}
    assert not readers & FORBIDDEN


@pytest.mark.parametrize("role", ROLES)
def test_all_constant_weights_but_the_output_layer_are_quantised(role: str) -> None:
    before, after = tidied(exported(role)), to_int8(exported(role), scales(exported(role)))
    held = constants(before)
    for old, new in zip(products(before), products(after), strict=True):
        is_output = old.input[1] in held and 1 in held[old.input[1]].shape
        if old.input[1] not in held or is_output:
            assert list(new.input) == list(old.input)
        else:
            assert new.input[0] == f"{old.input[0]}_dequantised"
            assert new.input[1].startswith(old.input[1])
            assert new.input[1].endswith("_dequantised")
            assert list(new.input[2:]) == []
            behind = [n for n in after.graph.node if n.output[0] == old.output[0]]
            assert [n.input[1] for n in behind if n.op_type == "Add"] == list(old.input[2:])
    n_weights = sum(n.input[1] in held for n in products(before))
    assert len(products_to_quantise(before)) == n_weights - 1 >= 3


@pytest.mark.parametrize("role", ROLES)
def test_a_weight_lies_in_the_file_as_int8_once_and_no_more_in_fp32(role: str) -> None:
    before = {p.weight for p in products_to_quantise(tidied(exported(role)))}
    held = constants(to_int8(exported(role), scales(exported(role))))
    assert not before & held.keys()
    assert sum(a.dtype == np.int8 and a.ndim == 2 for a in held.values()) == len(before)


@pytest.mark.parametrize("role", ROLES)
def test_an_activation_that_feeds_several_products_is_quantised_once(role: str) -> None:
    model = to_int8(exported(role), scales(exported(role)))
    quantised = [n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert sorted(quantised) == sorted(set(quantised)) == sorted(activations(tidied(exported(role))))


@pytest.mark.parametrize("role", ROLES)
def test_int8_over_fp32_and_over_fp16_hold_the_same_weights_and_scales(role: str) -> None:
    cpu = to_int8(exported(role), scales(exported(role)))
    gpu = constants(to_fp16(cpu))
    for name, values in constants(cpu).items():
        if values.dtype == np.int8 or name.endswith("_scale"):
            np.testing.assert_array_equal(gpu[name], values)


@pytest.mark.parametrize("role", ROLES)
def test_nothing_multiplies_in_fp32_after_the_conversion(role: str) -> None:
    model = exported(role)
    assert len(float32_products(tidied(model))) == len(products(model)) > 0
    assert float32_products(to_fp16(model)) == []
    assert float32_products(to_fp16(to_int8(model, scales(model)))) == []
    assert float32_products(to_int8(model, scales(model))) != []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("length", [1, 50, 100])
def test_every_precision_scores_close_to_fp32_and_an_empty_history_is_finite(
    tmp_path: Path, role: str, length: int
) -> None:
    model = exported(role)
    (batch,) = requests(length)
    batch.mask[0] = 0.0
    expected = run(model, batch, tmp_path)
    int8 = to_int8(model, scales(model))
    for converted, atol in ((to_fp16(model), 0.005), (int8, 0.05), (to_fp16(int8), 0.05)):
        np.testing.assert_allclose(run(converted, batch, tmp_path), expected, atol=atol)


@pytest.mark.parametrize("role", ROLES)
def test_int8_is_at_most_35_percent_and_fp16_about_half_of_fp32(role: str) -> None:
    model = tidied(exported(role))
    assert to_fp16(to_int8(model, scales(model))).ByteSize() <= 0.35 * model.ByteSize()
    assert to_fp16(model).ByteSize() <= 0.53 * model.ByteSize()


def test_inputs_and_output_stay_fp32() -> None:
    model = to_fp16(exported("rerank"))
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    before = exported("rerank").graph
    assert [v.name for v in model.graph.input] == [v.name for v in before.input]
    assert [v.name for v in model.graph.output] == [v.name for v in before.output]


def test_the_given_graph_is_left_as_it_was() -> None:
    model = exported("edge")
    before = model.SerializeToString()
    to_fp16(to_int8(model, scales(model)))
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop("relu"), "no scale for 'relu'"),
        (lambda s: s.update(other=1.0), "a scale for 'other', which this graph does not quantise"),
        (lambda s: s.update(relu=0.0), "the scale of 'relu' is 0.0"),
        (lambda s: s.update(relu=float("nan")), "the scale of 'relu' is nan"),
        (lambda s: s.update(relu=1e6), "the scale of 'relu' is 1000000.0"),
    ],
)
def test_scales_of_another_graph_are_refused(change: object, reason: str) -> None:
    given_scales = scales(plain())
    change(given_scales)  # type: ignore[operator]
    with pytest.raises(ReleaseRefused, match=reason):
        to_int8(plain(), given_scales)


def _graph(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], opset: int = 20) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("target", TensorProto.FLOAT, ["B", "N", 4])],
        [value("logits", TensorProto.FLOAT, ["B", "N", "K"])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def test_a_graph_that_is_all_output_layer_has_nothing_to_quantise() -> None:
    model = _graph([helper.make_node("MatMul", ["target", "w"], ["logits"])], {"w": np.ones((4, 1))})
    with pytest.raises(ReleaseRefused, match="no MatMul or Gemm with a constant weight"):
        to_int8(model, {})


@pytest.mark.parametrize("role", ROLES)
def test_activations_around_128_are_the_same_numbers(tmp_path: Path, role: str) -> None:
    model, (batch,) = exported(role), requests(7)
    signed, unsigned = (to_int8(model, scales(model, 0.02), unsigned=kind) for kind in (False, True))
    np.testing.assert_allclose(run(unsigned, batch, tmp_path), run(signed, batch, tmp_path), atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_onnx_runtime_multiplies_every_quantised_product_in_int8(tmp_path: Path, role: str) -> None:
    model = to_int8(exported(role), scales(exported(role)), unsigned=True)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert nodes.count("MatMulIntegerToFloat") + nodes.count("QGemm") == len(
        products_to_quantise(tidied(exported(role)))
    )
    assert "DequantizeLinear" not in nodes


def test_a_gemm_that_scales_its_product_keeps_its_bias() -> None:
    nodes = [
        helper.make_node("Gemm", ["target", "first", "bias"], ["a"], alpha=0.5),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "out"], ["logits"]),
    ]
    weights = {"first": np.ones((4, 5)), "bias": np.ones(5), "out": np.ones((5, 1))}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("target", TensorProto.FLOAT, ["N", 4])],
        [value("logits", TensorProto.FLOAT, ["N", 1])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (gemm,) = [n for n in to_int8(model, {"target": 0.1}).graph.node if n.op_type == "Gemm"]
    assert gemm.input[2] == "bias"


def test_products_that_are_to_stay_high_do_and_need_no_scale() -> None:
    model = to_int8(plain(), {"relu": 0.1}, keep_high=("target", "user"))
    assert [n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"] == ["relu"]
    held = constants(model)
    assert {"first", "side"} < held.keys()
    assert "second" not in held
    with pytest.raises(ReleaseRefused, match="a scale for 'user', which this graph does not quantise"):
        to_int8(plain(), {"relu": 0.1, "user": 0.1}, keep_high=("target", "user"))


def test_an_old_opset_is_refused() -> None:
    with pytest.raises(ReleaseRefused, match="opset 17; INT8 over FP16 needs 19"):
        to_int8(_graph([helper.make_node("MatMul", ["target", "w"], ["logits"])], {"w": np.ones((4, 1))}, 17), {})


def test_a_product_that_only_feeds_a_softmax_keeps_its_precision() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["target", "first"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "score"], ["c"]),
        node("Add", ["c", "mask"], ["d"]),
        node("Softmax", ["d"], ["e"]),
        node("MatMul", ["e", "second"], ["f"]),
        node("Relu", ["f"], ["g"]),
        node("MatMul", ["g", "out"], ["logits"]),
    ]
    weights = {"first": (4, 5), "score": (5, 6), "second": (6, 7), "out": (7, 1)}
    model = _graph(nodes, {**{k: np.ones(s) for k, s in weights.items()}, "mask": np.array(-1e4)})
    assert [p.weight for p in products_to_quantise(tidied(model))] == ["first", "second"]


@pytest.mark.parametrize("value", [-1e9, np.nan])
def test_a_constant_that_fp16_cannot_hold_is_refused_by_name(value: float) -> None:
    model = _graph([helper.make_node("Add", ["target", "mask"], ["logits"])], {"mask": np.array(value)})
    with pytest.raises(ReleaseRefused, match=r"mask holds .*FP16.*-1e4, not as -1e9"):
        to_fp16(model)


def test_an_operation_that_knows_no_fp16_is_refused_with_the_reason() -> None:
    nodes = [helper.make_node("Resize", ["target", "", "sizes"], ["logits"])]
    with pytest.raises(ReleaseRefused, match="the FP16 form of this graph is not valid"):
        to_fp16(_graph(nodes, {"sizes": np.ones(3)}))


def test_control_flow_is_refused_by_name() -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["target"], ["same"])],
        "branch",
        [],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, ["B", "N", 4])],
    )
    nodes = [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["logits"], name="choice", then_branch=branch, else_branch=branch),
    ]
    with pytest.raises(ReleaseRefused, match="choice: a graph with If is not converted"):
        to_fp16(_graph(nodes, {}))


def test_constants_fills_and_casts_inside_the_graph_become_fp16(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Shape", ["target"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("Constant", [], ["two"], value_float=2.0),
        node("Cast", ["shape"], ["sizes"], to=TensorProto.FLOAT),
        node("ReduceSum", ["sizes"], ["size"], keepdims=0),
        node("Add", ["target", "zeros"], ["a"]),
        node("Mul", ["a", "two"], ["b"]),
        node("Add", ["b", "size"], ["logits"]),
    ]
    converted = to_fp16(_graph(nodes, {}))
    session = ort.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    target = np.full((1, 2, 4), 1.5, np.float32)
    np.testing.assert_array_equal(session.run(None, {"target": target})[0], 2 * target + 7)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.floats(-100, 100, width=32)),
    st.sampled_from([0, 1]),
)
def test_a_weight_comes_back_within_half_a_step_of_its_channel(weight: np.ndarray, axis: int) -> None:
    stored, scale = quantise_weight(weight, axis)
    assert stored.min() >= -LEVELS
    step = np.expand_dims(scale, 1 - axis)
    assert (np.abs(stored * step - weight) <= 0.5 * step * (1 + 1e-5)).all()
    np.testing.assert_array_equal(scale.astype(np.float16).astype(np.float32), scale)


@given(st.floats(1e-7, 60000))
def test_a_scale_in_fp16_is_never_below_the_one_asked_for(scale: float) -> None:
    rounded = as_fp16_scale(scale)
    assert rounded >= scale
    assert rounded <= scale * (1 + 2**-10) + 2**-24
