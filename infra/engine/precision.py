"""INT8 by explicit QDQ: which products of a ranker's graph are quantised, and the graph with Q and DQ around them.

Quantised are MatMul and Gemm with a constant weight: their activation per tensor, their weight per output channel,
stored as INT8 with a DQ behind it. Everything else keeps its precision: products of two activations (attention), the
inputs of softmax and LayerNorm, embeddings, and the output layer, that is every product after which only shapes and
element-wise operations follow. Symmetric. One function serves both kinds of machine: through
`infra.engine.precision_fp16` over FP16 for GPUs, where zero points are 0 as TensorRT asks; and over FP32 for ONNX
Runtime, where activations are stored unsigned around 128, the same numbers, for which CPUs have instructions. A bias is
added behind its product, because ONNX Runtime runs no Gemm with an FP32 bias in INT8.
Refuses a graph without anything to quantise and scales that are not those of its activations. Invariant: scales are
FP16 numbers in both forms, so both hold the same INT8 weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


def to_int8(
    model: onnx.ModelProto, scales: Mapping[str, float], *, unsigned: bool = False, keep_high: Collection[str] = ()
) -> onnx.ModelProto:
    """The FP32 graph with Q and DQ. `scales`: activation -> the number one INT8 step stands for. `unsigned` activations
    are for CPUs. Products of the activations in `keep_high` stay as they are and have no scale.

    Raises ReleaseRefused when there is nothing to quantise, a scale is missing, left over or no positive number.
    """
    quantised = tidied(model)
    graph = quantised.graph
    opset = next(o.version for o in quantised.opset_import if o.domain in ("", "ai.onnx"))
    if opset < MIN_OPSET:
        raise ReleaseRefused(f"the graph has opset {opset}; INT8 over FP16 needs {MIN_OPSET} or more: export it anew")
    products = {p.node: p for p in products_to_quantise(quantised) if p.activation not in keep_high}
    if not products:
        raise ReleaseRefused("no MatMul or Gemm with a constant weight is to be quantised in this graph")
    steps = check_scales(scales, dict.fromkeys(p.activation for p in products.values()))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    ways = _Ways(128 if unsigned else 0)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if (product := products.get(node.name)) is not None:
            node.input[0] = ways.through_int8(product.activation, steps[product.activation])
            node.input[1] = ways.from_int8(product, constants[product.weight])
            nodes += ways.taken()
            nodes += _bias_behind(node)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(ways.constants.values())
    drop_unused(graph)
    check_valid(quantised, "INT8")
    return quantised


def check_valid(model: onnx.ModelProto, form: str) -> None:
    """Raises ReleaseRefused when the types and shapes of a converted graph do not fit together."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ReleaseRefused(f"the {form} form of this graph is not valid: {error}") from error


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


class _Ways:
    """Q and DQ nodes with their constants; each tensor goes through INT8 once, however many products read it."""

    def __init__(self, zero: int) -> None:
        self._zero = np.array(zero, np.uint8 if zero else np.int8)
        self.constants: dict[str, onnx.TensorProto] = {}
        self._made: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []

    def taken(self) -> list[onnx.NodeProto]:
        """Nodes made since the last call."""
        nodes, self._nodes = self._nodes, []
        return nodes

    def through_int8(self, activation: str, step: np.float32) -> str:
        """Name of the activation behind Q and DQ."""
        if activation not in self._made:
            scale = self._constant(f"{activation}_scale", np.array(step, np.float32))
            zero = self._constant("int8_zero", self._zero)
            stored = self._node("QuantizeLinear", [activation, scale, zero], f"{activation}_int8")
            self._made[activation] = self._node("DequantizeLinear", [stored, scale, zero], f"{activation}_dequantised")
        return self._made[activation]

    def from_int8(self, product: Product, weight: F32) -> str:
        """Name of the product's weight behind the DQ of its INT8 form."""
        name = f"{product.weight}_{product.axis}"
        if name not in self._made:
            values, steps = quantise_weight(weight, product.axis)
            inputs = [
                self._constant(f"{name}_int8", values),
                self._constant(f"{name}_scale", steps),
                self._constant(f"{name}_zero", np.zeros(steps.size, np.int8)),
            ]
            self._made[name] = self._node("DequantizeLinear", inputs, f"{name}_dequantised", axis=product.axis)
        return self._made[name]

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self.constants[name] = numpy_helper.from_array(values, name)
        return name

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: int) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], name=f"{output}_{kind}", **attributes))
        return output


def _bias_behind(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The product and what it adds as nodes of their own."""
    scaled = any(a.name in ("alpha", "beta") and a.f != 1.0 for a in node.attribute)
    if node.op_type != "Gemm" or len(node.input) < 3 or not node.input[2] or scaled:
        return [node]
    bias, output = node.input[2], node.output[0]
    del node.input[2:]
    node.output[0] = f"{output}_product"
    return [node, helper.make_node("Add", [node.output[0], bias], [output], name=f"{output}_Add")]


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
