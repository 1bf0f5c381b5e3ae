"""A ranker's graph in half precision, for GPUs that have no FP32 matrix product worth using (a T4 refuses one).

Every FP32 constant and every operation becomes FP16; inputs and output stay FP32 with a Cast at the edge, so callers do
not change. INT8 weights with their DQ stay: their scales become FP16 and with them what DQ gives back.
Refuses a constant that FP16 cannot hold (a mask of -1e9 is -inf there, and 0 * -inf is NaN: use -1e4) and graphs with
control flow. Invariant: no product of the result multiplies in FP32.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from infra.engine.precision import PRODUCTS, check_valid, tidied
from infra.errors import ReleaseRefused

LARGEST = float(np.finfo(np.float16).max)
_CONTROL_FLOW = ("If", "Loop", "Scan")


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in FP16 with FP32 inputs and outputs. Raises ReleaseRefused when FP16 cannot express it."""
    half = tidied(model)
    graph = half.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(_half(tensor, tensor.name))
    for node in graph.node:
        _convert(node)
    _cast_edges(graph)
    check_valid(half, "FP16")
    if left := float32_products(half):
        raise ReleaseRefused(f"{left[0]} would still multiply in FP32; GPUs of SM75 (T4) refuse that")
    return half


def float32_products(model: onnx.ModelProto) -> list[str]:
    """Names of the MatMul and Gemm nodes that multiply in FP32."""
    inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    kinds = {tensor.name: tensor.data_type for tensor in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        kinds[value.name] = value.type.tensor_type.elem_type
    return [
        node.name
        for node in inferred.node
        if node.op_type in PRODUCTS and any(kinds.get(name) == TensorProto.FLOAT for name in node.input)
    ]


def _convert(node: onnx.NodeProto) -> None:
    """Make what a node fixes as FP32 FP16: constants, casts, fills."""
    if node.op_type in _CONTROL_FLOW:
        raise ReleaseRefused(f"{node.name}: a graph with {node.op_type} is not converted to FP16")
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
            attribute.t.CopyFrom(_half(attribute.t, node.name))
        elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            tensor = _half(numpy_helper.from_array(np.array(values, np.float32)), node.name)
            attribute.CopyFrom(helper.make_attribute("value", tensor))
    if node.op_type == "ConstantOfShape" and not node.attribute:
        zero = numpy_helper.from_array(np.zeros(1, np.float16))
        node.attribute.append(helper.make_attribute("value", zero))


def _half(tensor: onnx.TensorProto, where: str) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor)
    finite = np.abs(values[np.isfinite(values)])
    if np.isnan(values).any() or finite.max(initial=0.0) > LARGEST:
        raise ReleaseRefused(
            f"{where or 'a constant'} holds {'NaN' if np.isnan(values).any() else f'{finite.max():.3g}'}, which FP16 "
            f"cannot (largest {LARGEST:.0f}); a mask is added as -1e4, not as -1e9"
        )
    return numpy_helper.from_array(values.astype(np.float16), tensor.name)


def _cast_edges(graph: onnx.GraphProto) -> None:
    """Cast FP32 inputs to FP16 where they enter and the outputs back where they leave."""
    entering = {v.name: f"{v.name}_fp16" for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    leaving = {v.name: f"{v.name}_fp16" for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = entering.get(name, leaving.get(name, name))
        for i, name in enumerate(node.output):
            node.output[i] = leaving.get(name, name)
    read = {name for node in graph.node for name in node.input}
    first = [_cast(name, half, TensorProto.FLOAT16) for name, half in entering.items() if half in read]
    last = [_cast(half, name, TensorProto.FLOAT) for name, half in leaving.items()]
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)


def _cast(given: str, made: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [given], [made], name=f"{made}_Cast", to=kind)
