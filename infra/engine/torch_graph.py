"""A ranker's ONNX file as a PyTorch module: a release holds its weights once, in ONNX, and PyTorch computes from them.

Every node becomes one call of a `torch.fx` graph, so the module can run eagerly, under a CUDA graph, or be compiled and
exported. Refuses an operator that is not in `OPERATORS`, by name, and a graph with control flow. FP16 is the FP32 file
with `half()` of weights and inputs; a mask of -1e4 stays finite there. Invariant: shapes follow the inputs; nothing of
one batch is baked in. Needs torch; not imported unless an engine runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx, nn
from torch.nn import functional

from infra.engine.run import INPUT_NAMES, EngineUnavailable
from infra.errors import ReleaseRefused

Attributes = dict[str, Any]
# (node's attributes, inputs; an input left out is None) -> output, or outputs.
Operator = Callable[..., Any]

_TORCH_TYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.BOOL: torch.bool,
}


def read_module(path: Path, *, half: bool = False) -> fx.GraphModule:
    """The module: forward(hist, target, mask, user) -> logits, in eval mode. Raises EngineUnavailable without the file,
    ReleaseRefused when it is no ranker, or has an operator that is not known here."""
    if not path.is_file():
        raise EngineUnavailable(f"{path}: there is no such file")
    try:
        model = onnx.load(path)
    except Exception as error:
        raise ReleaseRefused(f"{path}: no ONNX model can be read from it: {error}") from error
    return module_of(model, path.name, half=half)


def module_of(model: onnx.ModelProto, name: str, *, half: bool = False) -> fx.GraphModule:
    """The module of a model in memory; see `read_module`."""
    taken = [value.name for value in model.graph.input]
    if not set(taken) <= set(INPUT_NAMES) or "target" not in taken or len(model.graph.output) != 1:
        raise ReleaseRefused(f"{name}: inputs {taken} are not those of a ranker {INPUT_NAMES}")
    constants = _Constants(half)
    for tensor in model.graph.initializer:
        constants.keep(tensor.name, numpy_helper.to_array(tensor))
    graph = fx.Graph()
    values: dict[str, fx.Node] = {value: graph.placeholder(value) for value in INPUT_NAMES}
    for number, node in enumerate(model.graph.node):
        if node.op_type == "Constant":
            constants.keep(node.output[0], _constant(node, name))
            continue
        if node.op_type not in OPERATORS:
            raise ReleaseRefused(f"{name}: PyTorch engines do not know the operator {node.op_type} ({node.name})")
        given = [_value(graph, values, constants, used) for used in node.input]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        attributes["outputs"], attributes["half"] = len(node.output), half
        made = graph.call_function(OPERATORS[node.op_type], (attributes, *given), name=f"{node.op_type}_{number}")
        if len(node.output) == 1:
            values[node.output[0]] = made
        else:
            for at, output in enumerate(node.output):
                values[output] = graph.call_function(nth, (made, at))
    graph.output(_value(graph, values, constants, model.graph.output[0].name))
    module = fx.GraphModule(constants, graph)
    return module.eval()


def widths_of(path: Path) -> tuple[int, int]:
    """Of a token and of a user in a ranker's file; 0 for a user that it does not take."""
    found = {v.name: v.type.tensor_type.shape.dim[-1].dim_value for v in onnx.load(path).graph.input}
    return found["target"], found.get("user", 0)


class _Constants(nn.Module):
    """Weights and other constants, as buffers `c0`, `c1` ... that move with the module."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self._half = half
        self._names: dict[str, str] = {}

    def keep(self, name: str, value: Any) -> None:
        tensor = torch.from_numpy(np.array(value))
        if self._half and tensor.dtype == torch.float32:
            tensor = tensor.half()
        self._names[name] = f"c{len(self._names)}"
        self.register_buffer(self._names[name], tensor)

    def buffer_of(self, name: str) -> str | None:
        return self._names.get(name)


def _value(graph: fx.Graph, values: dict[str, fx.Node], constants: _Constants, name: str) -> Any:
    """What a node reads: nothing, a value made before, or a constant; integers are read at once, because axes and
    sizes shape the computation."""
    if not name:
        return None
    if name not in values:
        buffer = constants.buffer_of(name)
        if buffer is None:
            raise ReleaseRefused(f"{name!r} is read before it is made")
        tensor: Tensor = getattr(constants, buffer)
        if tensor.dtype == torch.int64:
            return tensor.tolist()
        values[name] = graph.get_attr(buffer)
    return values[name]


def _constant(node: onnx.NodeProto, name: str) -> Any:
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return numpy_helper.to_array(value)
    if attribute.name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    if attribute.name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise ReleaseRefused(f"{name}: a Constant by {attribute.name} is not known here")


def nth(values: Sequence[Tensor], at: int) -> Tensor:
    """One output of a node that has several."""
    return values[at]


def _axes(attributes: Attributes, axes: Sequence[int] | None) -> list[int] | None:
    """Since opset 13 an input, before an attribute."""
    found = axes if axes is not None else attributes.get("axes")
    return None if found is None else list(found)


def _unsqueeze(attributes: Attributes, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    for axis in sorted(_axes(attributes, axes) or []):
        x = x.unsqueeze(axis)
    return x


def _squeeze(attributes: Attributes, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    found = _axes(attributes, axes)
    return x.squeeze() if found is None else x.squeeze(tuple(found))


def _reduced(reduce: Callable[..., Tensor]) -> Operator:
    def reduced(attributes: Attributes, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        found = _axes(attributes, axes)
        return reduce(
            x, dim=list(range(x.dim())) if found is None else found, keepdim=bool(attributes.get("keepdims", 1))
        )

    return reduced


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if attributes.get("transA") else a
    b = b.t() if attributes.get("transB") else b
    product = a @ b * attributes["alpha"] if attributes.get("alpha", 1.0) != 1.0 else a @ b
    if c is None:
        return product
    return product + (c if attributes.get("beta", 1.0) == 1.0 else c * attributes["beta"])


def _split(attributes: Attributes, x: Tensor, sizes: Any = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is None:
        return torch.tensor_split(x, attributes["outputs"], dim=axis)
    return torch.split(x, _integers(sizes), dim=axis)


def _clip(attributes: Attributes, x: Tensor, least: Tensor | None = None, most: Tensor | None = None) -> Tensor:
    return torch.clamp(x, least, most) if least is not None or most is not None else x


def _cast(attributes: Attributes, x: Any) -> Any:
    kind = _TORCH_TYPES[attributes["to"]]
    if attributes["half"] and kind == torch.float32:
        kind = torch.float16
    return x.to(kind) if isinstance(x, Tensor) else x


def _shape(attributes: Attributes, x: Tensor) -> list[int]:
    """A list of sizes, not a tensor: sizes are known where a batch is, and a GPU need not be asked."""
    return list(x.shape)[attributes.get("start", 0) : attributes.get("end")]


def _gather(attributes: Attributes, x: Any, at: Any) -> Any:
    """Constant indices become views: copying them to the GPU in every run is what no capture allows."""
    if isinstance(x, list):
        return [x[i] for i in at] if isinstance(at, list) else x[at]
    axis = attributes.get("axis", 0)
    if isinstance(at, int):
        return x.select(axis, at)
    if isinstance(at, list):
        return torch.stack([_gather(attributes, x, one) for one in at], dim=axis)
    return x.index_select(axis, at.flatten()).unflatten(axis, at.shape)


def _concat(attributes: Attributes, *parts: Any) -> Any:
    if not any(isinstance(part, Tensor) for part in parts):
        return [number for part in parts for number in _integers(part)]
    return torch.cat(parts, dim=attributes["axis"])


def _reshape(attributes: Attributes, x: Tensor, shape: Any) -> Tensor:
    sizes = _integers(shape)
    return x.reshape(
        [x.shape[i] if size == 0 and not attributes.get("allowzero") else size for i, size in enumerate(sizes)]
    )


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)


def _expand(attributes: Attributes, x: Tensor, shape: Any) -> Tensor:
    return x * torch.ones(_integers(shape), dtype=x.dtype, device=x.device)


def _layer_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = attributes.get("axis", -1) % x.dim()
    return functional.layer_norm(x, x.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _integers(value: Any) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _simple(function: Callable[..., Any]) -> Operator:
    """An operator without attributes."""

    def operator(_attributes: Attributes, *inputs: Any) -> Any:
        return function(*inputs)

    return operator


OPERATORS: dict[str, Operator] = {
    "Add": _simple(lambda a, b: a + b),
    "Sub": _simple(lambda a, b: a - b),
    "Mul": _simple(lambda a, b: a * b),
    "Div": _simple(lambda a, b: a / b),
    "Neg": _simple(lambda a: -a),
    "Pow": _simple(lambda a, b: a**b),
    "MatMul": _simple(lambda a, b: a @ b),
    "Gemm": _gemm,
    "Relu": _simple(torch.relu),
    "LeakyRelu": lambda attributes, x: functional.leaky_relu(x, attributes.get("alpha", 0.01)),
    "PRelu": _simple(lambda x, slope: torch.where(x < 0, slope * x, x)),
    "Gelu": lambda attributes, x: functional.gelu(x, approximate=attributes.get("approximate", b"none").decode()),
    "Sigmoid": _simple(torch.sigmoid),
    "Tanh": _simple(torch.tanh),
    "Exp": _simple(torch.exp),
    "Log": _simple(torch.log),
    "Sqrt": _simple(torch.sqrt),
    "Reciprocal": _simple(torch.reciprocal),
    "Softmax": lambda attributes, x: torch.softmax(x, dim=attributes.get("axis", -1)),
    "LayerNormalization": _layer_norm,
    "ReduceSum": _reduced(torch.sum),
    "ReduceMean": _reduced(torch.mean),
    "ReduceMax": _reduced(torch.amax),
    "Clip": _clip,
    "Where": _simple(torch.where),
    "Greater": _simple(lambda a, b: a > b),
    "Less": _simple(lambda a, b: a < b),
    "Equal": _simple(lambda a, b: a == b),
    "Not": _simple(torch.logical_not),
    "Cast": _cast,
    "Identity": _simple(lambda x: x),
    "Shape": _shape,
    "Gather": _gather,
    "Concat": _concat,
    "Split": _split,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda attributes, x: x.permute(attributes.get("perm") or tuple(reversed(range(x.dim())))),
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
}
