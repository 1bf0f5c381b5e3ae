"""A ranker's ONNX file as a PyTorch module: a release holds its weights once, in ONNX, and PyTorch computes from them.

Every node becomes one call of a `torch.fx` graph, so the module can run eagerly, under a CUDA graph, or be compiled and
exported. Refuses an operator that `torch_operators.py` does not know, by name, and a graph with control flow. FP16 is
the FP32 file with `half()` of weights and inputs; a mask of -1e4 stays finite there. Invariant: shapes follow the
inputs; nothing of one batch is baked in. Needs torch; not imported unless an engine runs on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx, nn

from infra.engine.run import INPUT_NAMES, EngineUnavailable
from infra.engine.torch_operators import OPERATORS, nth
from infra.errors import ReleaseRefused


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
