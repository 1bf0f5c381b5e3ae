"""What each ONNX operator is in PyTorch, for `infra.engine.torch_graph`.

Sizes are integers and lists of them, never tensors. Refuses attributes that are not known, where they change the
result. Invariant: an operator on tensors of a GPU neither waits for it nor brings host memory to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn import functional

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


def nth(values: Sequence[Tensor], at: int) -> Tensor:
    """One output of a node that has several."""
    return values[at]


def _axes(attributes: Attributes, axes: Sequence[int] | None) -> list[int] | None:
    """Since opset 13 an input, before an attribute."""
    found = axes if axes is not None else attributes.get("axes")
    return None if found is None else list(found)


def _unsqueeze(attributes: Attributes, x: Any, axes: Sequence[int] | None = None) -> Any:
    if not isinstance(x, Tensor):
        return [x]
    for axis in sorted(_axes(attributes, axes) or []):
        x = x.unsqueeze(axis)
    return x


def _squeeze(attributes: Attributes, x: Any, axes: Sequence[int] | None = None) -> Any:
    if isinstance(x, list):
        return x[0]
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
    """A list of sizes, not a tensor: sizes are known where a batch is, and a GPU need not be asked. One of them alone
    is a number."""
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


def _slice(_attributes: Attributes, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Steps forward only: PyTorch has no views that run backward."""
    bounds = list(zip(_integers(starts), _integers(ends), strict=True))
    for at, (start, end) in enumerate(bounds):
        axis = at if axes is None else _integers(axes)[at]
        step = 1 if steps is None else _integers(steps)[at]
        # Not by indexing, which asks where the tensor lies.
        x = x[start:end:step] if isinstance(x, list) else torch.ops.aten.slice.Tensor(x, axis, start, end, step)
    return x


def _concat(attributes: Attributes, *parts: Any) -> Any:
    if not any(isinstance(part, Tensor) for part in parts):
        return [number for part in parts for number in _integers(part)]
    return torch.cat(parts, dim=attributes["axis"])


def _reshape(attributes: Attributes, x: Any, shape: Any) -> Any:
    sizes = _integers(shape)
    if not isinstance(x, Tensor):
        return _integers(x)
    return x.reshape(
        [x.shape[i] if size == 0 and not attributes.get("allowzero") else size for i, size in enumerate(sizes)]
    )


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)


def _expand(attributes: Attributes, x: Tensor, shape: Any) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, _integers(shape)))  # type: ignore[no-untyped-call]


def _cum_sum(attributes: Attributes, x: Tensor, axis: int) -> Tensor:
    if attributes.get("exclusive") or attributes.get("reverse"):
        raise ReleaseRefused("PyTorch engines do not know an exclusive or reverse CumSum")
    return torch.cumsum(x, axis)


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
    "Slice": _slice,
    "Split": _split,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda attributes, x: x.permute(attributes.get("perm") or tuple(reversed(range(x.dim())))),
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "CumSum": _cum_sum,
}
