"""Rankers from files, a program of `torch.export` (.pt2) or an ONNX graph (.onnx), as modules to check and score with.

Load a .pt2 only from somebody you trust: it may run code. Refuses files that are no ranker. Invariant: what is returned
has the signature (hist, target, mask, user), whatever the file calls its inputs inside.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.ranker_contract import ModelRefused
from infra.errors import TrirankError

_QUANTISED = ("QuantizeLinear", "DequantizeLinear")
_NOT_FP32 = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


class Exported(nn.Module):
    """A program of `torch.export`; it has no training mode, so `train` and `eval` leave it as it is."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def train(self, mode: bool = True) -> Exported:
        self.training = mode
        return self

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N]."""
        return self.program(hist, target, mask, user)  # type: ignore[no-any-return]


class Graph(nn.Module):
    """An ONNX graph, run by ONNX Runtime; without gradients."""

    def __init__(self, engine: OnnxEngine) -> None:
        super().__init__()
        self._engine = engine

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits f32[B, N]. Raises Permanent and NonFiniteScores, as the engine does."""
        inputs = (np.ascontiguousarray(x.numpy()) for x in (hist, target, mask, user))
        return torch.from_numpy(self._engine.run(*inputs))


def module_of(file: Path) -> nn.Module:
    """The ranker in a .pt2 or .onnx file. Raises ModelRefused."""
    if not file.is_file():
        raise ModelRefused(f"{file}: there is no such file")
    if file.suffix == ".onnx":
        engine = OnnxEngine(file)
        try:
            engine.load()
        except TrirankError as error:
            raise ModelRefused(str(error)) from error
        if lower := _lower_precision(onnx.load(file)):
            raise ModelRefused(f"{file}: it holds {lower}; give the FP32 model, lower precisions are made from it")
        return Graph(engine)
    if file.suffix != ".pt2":
        raise ModelRefused(f"{file}: give a .pt2 (torch.export.save), an .onnx, or package.module:factory")
    try:
        return Exported(torch.export.load(file).module())
    except Exception as error:  # as many kinds as there are ways to damage a file
        raise ModelRefused(f"{file}: torch.export cannot load it: {error}") from error


def _lower_precision(graph: onnx.ModelProto) -> str:
    """What of a graph is not FP32, empty for one that is."""
    quantised = (node.op_type for node in graph.graph.node if node.op_type in _QUANTISED)
    others = (constant.data_type for constant in graph.graph.initializer if constant.data_type in _NOT_FP32)
    return next(quantised, "") or next((onnx.TensorProto.DataType.Name(kind) for kind in others), "")
