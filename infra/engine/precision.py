"""INT8 by explicit QDQ: which products of a ranker's graph are quantised, and the graph with Q and DQ around them.

Quantised are MatMul and Gemm with a constant weight: their activation per tensor, their weight per output channel,
stored as INT8 with a DQ behind it. Everything else keeps its precision: products of two activations (attention), the
inputs of softmax and LayerNorm, embeddings, and the output layer, that is every product after which only shapes and
element-wise operations follow. Symmetric, zero point 0, as TensorRT asks. One function serves both kinds of machine:
over FP32 for ONNX Runtime on CPUs, and through `infra.engine.precision_fp16` over FP16 for GPUs.
Refuses a graph without anything to quantise and scales that are not those of its activations. Invariant: scales are
FP16 numbers in both forms, so both hold the same INT8 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from infra.errors import ReleaseRefused

F32 = NDArray[np.float32]

PRODUCTS = ("MatMul", "Gemm")
# FP16 scales of Q and DQ came with opset 19.
MIN_OPSET = 19
LEVELS = 127
# Behind the output layer, or between a product and a softmax, there is nothing but these.
_SHAPES = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Concat", "Cast"}
_TRANSPARENT = _SHAPES | {"Add", "Sub", "Clip", "Where", "Relu", "LeakyRelu", "Sigmoid"}


@dataclass(frozen=True, slots=True)
class Product:
    """One product to quantise: its node, its activation, its weight and the weight's axis of output channels."""

    node: str
    activation: str
    weight: str
    axis: int


def tidied(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without what an exporter leaves behind: stack traces, inferred shapes, texts. Every node has a name."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.doc_string = ""
    for holder in (copy, copy.graph):
        del holder.metadata_props[:]
    copy.graph.doc_string = ""
    del copy.graph.value_info[:]
    for number, node in enumerate(copy.graph.node):
        del node.metadata_props[:]
        node.doc_string = ""
        node.name = node.name or f"{node.op_type}_{number}"
    return copy


def products_to_quantise(model: onnx.ModelProto) -> list[Product]:
    """In graph order. The model's nodes need names (`tidied`)."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2}
    high = _output_layers(graph)
    found = []
    for node in graph.node:
        if node.op_type in PRODUCTS and node.input[1] in weights and node.name not in high:
            if node.input[0] in weights or _flag(node, "transA"):
                continue
            axis = 0 if node.op_type == "Gemm" and _flag(node, "transB") else 1
            found.append(Product(node.name, node.input[0], node.input[1], axis))
    return found


def activations(model: onnx.ModelProto) -> list[str]:
    """Tensors that need a scale, each once, in graph order."""
    return list(dict.fromkeys(product.activation for product in products_to_quantise(model)))


def to_int8(model: onnx.ModelProto, scales: Mapping[str, float]) -> onnx.ModelProto:
    """The FP32 graph with Q and DQ. `scales`: activation -> the number one INT8 step stands for.

    Raises ReleaseRefused when there is nothing to quantise, a scale is missing, left over or no positive number.
    """
    quantised = tidied(model)
    graph = quantised.graph
    opset = next(o.version for o in quantised.opset_import if o.domain in ("", "ai.onnx"))
    if opset < MIN_OPSET:
        raise ReleaseRefused(f"the graph has opset {opset}; INT8 over FP16 needs {MIN_OPSET} or more: export it anew")
    products = {product.node: product for product in products_to_quantise(quantised)}
    if not products:
        raise ReleaseRefused("no MatMul or Gemm with a constant weight is to be quantised in this graph")
    steps = check_scales(scales, activations(quantised))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    made: dict[str, onnx.TensorProto] = {}
    quantised_already: dict[str, str] = {}
    for node in graph.node:
        if (product := products.get(node.name)) is not None:
            if product.activation not in quantised_already:
                more, tensors = _around(product.activation, steps[product.activation])
                quantised_already[product.activation] = more[-1].output[0]
                nodes += more
                made |= tensors
            node.input[0] = quantised_already[product.activation]
            of_weight = f"{product.weight}_{product.axis}"
            if of_weight not in quantised_already:
                more, tensors = _dequantised(of_weight, constants[product.weight], product.axis)
                quantised_already[of_weight] = more[0].output[0]
                nodes += more
                made |= tensors
            node.input[1] = quantised_already[of_weight]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(made.values())
    drop_unused(graph)
    onnx.checker.check_model(quantised, full_check=True)
    return quantised


def check_scales(scales: Mapping[str, float], wanted: Iterable[str]) -> dict[str, np.float32]:
    """The scales as FP16 numbers. Raises ReleaseRefused when they are not those of `wanted`."""
    names = list(wanted)
    if missing := [name for name in names if name not in scales]:
        raise ReleaseRefused(
            f"there is no scale for {missing[0]!r}: these scales are those of another graph; calibrate again"
        )
    if extra := sorted(set(scales) - set(names)):
        raise ReleaseRefused(f"there is a scale for {extra[0]!r}, which this graph does not quantise; calibrate again")
    steps = {name: as_fp16_scale(scales[name]) for name in names}
    if bad := [name for name, step in steps.items() if not (np.isfinite(step) and step > 0)]:
        raise ReleaseRefused(f"the scale of {bad[0]!r} is {scales[bad[0]]}, which is no positive FP16 number")
    return steps


def as_fp16_scale(scale: float) -> np.float32:
    """The smallest FP16 number that is not below `scale`, so that rounding clips nothing."""
    with np.errstate(over="ignore"):
        rounded = np.float16(scale)
        if float(rounded) < scale:
            rounded = np.nextafter(rounded, np.float16(np.inf))
    return np.float32(rounded)


def quantise_weight(weight: F32, axis: int) -> tuple[NDArray[np.int8], F32]:
    """INT8 weight and the FP16 scale of each output channel; a channel of zeros has scale 1."""
    largest = np.abs(weight).max(axis=1 - axis)
    scale = np.array([as_fp16_scale(float(m) / LEVELS) if m > 0 else 1.0 for m in largest], np.float32)
    if not np.isfinite(scale).all():
        raise ReleaseRefused("a weight is no finite number that FP16 scales can hold")
    steps = np.rint(weight / np.expand_dims(scale, 1 - axis))
    return np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scale


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove initializers that no node and no output reads."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _around(activation: str, step: np.float32) -> tuple[list[onnx.NodeProto], dict[str, onnx.TensorProto]]:
    """Q and DQ of one activation."""
    scale, zero = f"{activation}_scale", "int8_zero"
    stored, back = f"{activation}_int8", f"{activation}_dequantised"
    nodes = [
        helper.make_node("QuantizeLinear", [activation, scale, zero], [stored], name=f"{activation}_Q"),
        helper.make_node("DequantizeLinear", [stored, scale, zero], [back], name=f"{activation}_DQ"),
    ]
    tensors = {
        scale: numpy_helper.from_array(np.array(step, np.float32), scale),
        zero: numpy_helper.from_array(np.array(0, np.int8), zero),
    }
    return nodes, tensors


def _dequantised(name: str, weight: F32, axis: int) -> tuple[list[onnx.NodeProto], dict[str, onnx.TensorProto]]:
    """The INT8 weight and its DQ."""
    stored, scale, zero = f"{name}_int8", f"{name}_scale", f"{name}_zero"
    values, steps = quantise_weight(weight, axis)
    node = helper.make_node(
        "DequantizeLinear", [stored, scale, zero], [f"{name}_dequantised"], name=f"{name}_DQ", axis=axis
    )
    tensors = {
        stored: numpy_helper.from_array(values, stored),
        scale: numpy_helper.from_array(steps, scale),
        zero: numpy_helper.from_array(np.zeros(steps.size, np.int8), zero),
    }
    return [node], tensors


def _output_layers(graph: onnx.GraphProto) -> set[str]:
    """Names of the products that lie before an output or a softmax with only transparent nodes between."""
    made_by = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    waiting = [output.name for output in graph.output]
    waiting += [node.input[0] for node in graph.node if node.op_type == "Softmax"]
    seen, found = set(waiting), set()
    while waiting:
        node = made_by.get(waiting.pop())
        if node is None:
            continue
        if node.op_type in PRODUCTS:
            found.add(node.name)
        elif node.op_type in _TRANSPARENT or (
            node.op_type in ("Mul", "Div") and any(name in constants for name in node.input)
        ):
            new = [name for name in node.input if name not in seen]
            seen.update(new)
            waiting += new
    return found


def _flag(node: onnx.NodeProto, name: str) -> bool:
    return any(a.name == name and a.i for a in node.attribute)
