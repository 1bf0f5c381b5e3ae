"""The release's models as PyTorch modules: the classes they were trained as, with weights read from the ONNX files.

The exporter keeps the names of weights, except of those it transposes; of these it keeps the order of operations. So
the modules whose weights have no name in the graph are listed in the order in which a forward pass calls them, and
paired with the nodes whose constant weights have other names. Refuses a pairing that does not give the graph's logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from edge_ranker.model import EdgeMLP
from infra.engine.onnx_cpu import OnnxEngine
from infra.release import Release
from reranker.model import BST

M = TypeVar("M", bound=nn.Module)
TOLERANCE = 1e-3
_WITH_WEIGHTS = {nn.Linear: ("MatMul", "Gemm"), nn.LayerNorm: ("LayerNormalization",)}


def load_models(release: Release, *, token_dim: int, user_dim: int) -> tuple[EdgeMLP, BST]:
    """Edge ranker and reranker (its shared form) of a release, ready for inference."""
    edge = _load(EdgeMLP(token_dim, user_dim), release.edge_model, token_dim, user_dim)
    rerank = _load(BST(token_dim, user_dim), release.rerank_model, token_dim, user_dim)
    return edge, rerank


def _load(model: M, path: Path, token_dim: int, user_dim: int) -> M:
    model.eval().requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    inputs = (
        torch.randn(2, 7, token_dim, generator=random),
        torch.randn(2, 9, token_dim, generator=random),
        torch.ones(2, 7),
        torch.randn(2, user_dim, generator=random),
    )
    graph = onnx.load(path).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    parameters = dict(model.named_parameters())
    named = {id(parameter) for name, parameter in parameters.items() if name in constants}
    transposed = constants.keys() - parameters.keys()
    for kind, operators in _WITH_WEIGHTS.items():
        nodes = [n for n in graph.node if n.op_type in operators and n.input[1] in transposed]
        calls = [m for m in _calls(model, kind, inputs) if id(m.weight) not in named]
        if len(nodes) != len(calls):
            raise ValueError(f"{path}: {len(nodes)} nodes with weights for {len(calls)} calls of {kind.__name__}")
        for module, node in zip(calls, nodes, strict=True):
            _assign(module, node, constants)
    for name, parameter in parameters.items():
        if name in constants:
            parameter.copy_(torch.from_numpy(constants[name].copy()))
    expected = OnnxEngine(path).run(*(tensor.numpy() for tensor in inputs))
    difference = float(np.abs(model(*inputs).numpy() - expected).max())
    if not difference <= TOLERANCE:
        raise ValueError(f"{path}: the PyTorch module differs from the graph by {difference:.1e}")
    return model


def _calls(model: nn.Module, kind: type[nn.Module], inputs: tuple[Tensor, ...]) -> list[nn.Module]:
    """Modules of one kind, in the order in which a forward pass calls them."""
    called: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda m, *_: called.append(m))
        for module in model.modules()
        if isinstance(module, kind)
    ]
    model(*inputs)
    for hook in hooks:
        hook.remove()
    return called


def _assign(module: nn.Module, node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> None:
    weight = torch.from_numpy(constants[node.input[1]].copy())
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    if isinstance(module, nn.Linear) and not transposed:
        weight = weight.t()
    module.get_parameter("weight").copy_(weight)
    if len(node.input) > 2 and node.input[2] in constants:
        module.get_parameter("bias").copy_(torch.from_numpy(constants[node.input[2]].copy()))
