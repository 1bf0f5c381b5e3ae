"""An FP16 graph as a GPU computes it, for a machine without one: every operation in FP32, its result rounded to FP16.

That is FP16 storage with FP32 accumulation, the arithmetic of tensor cores. ONNX Runtime does not give it on a CPU: it
puts casts around each operation and takes those between two of them away again, so nothing is rounded in between and
nothing overflows. Only for measuring: slower than FP32, and never released. Refuses nothing. Invariant: what overflows
in FP16 is infinite here.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

# What only moves numbers, or keeps one of those it is given, rounds nothing.
_EXACT = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
    | {"Unsqueeze", "Where", "Constant", "ConstantOfShape"}
)


def emulated(half: onnx.ModelProto) -> onnx.ModelProto:
    """The FP32 graph that gives the numbers of the FP16 graph `half`."""
    kinds = _kinds(half)
    model = onnx.ModelProto()
    model.CopyFrom(half)
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(_wide(tensor))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        _widen(node)
        nodes.append(node)
        if node.op_type not in _EXACT:
            nodes += _rounded(node, kinds)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.checker.check_model(model, full_check=True)
    return model


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every tensor."""
    graph = shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _widen(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT16:
            attribute.t.CopyFrom(_wide(attribute.t))
        elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT16:
            attribute.i = TensorProto.FLOAT


def _rounded(node: onnx.NodeProto, kinds: dict[str, int]) -> list[onnx.NodeProto]:
    """To FP16 and back behind each output that is FP16; the node's outputs get other names."""
    casts = []
    for i, name in enumerate(node.output):
        if kinds.get(name) == TensorProto.FLOAT16:
            wide, half = f"{name}_fp32", f"{name}_rounded"
            node.output[i] = wide
            casts.append(helper.make_node("Cast", [wide], [half], name=half, to=TensorProto.FLOAT16))
            casts.append(helper.make_node("Cast", [half], [name], name=f"{name}_back", to=TensorProto.FLOAT))
    return casts


def _wide(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
