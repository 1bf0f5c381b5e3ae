"""Rankers that a GPU computes in one kernel; needs Triton, which every build of PyTorch for CUDA brings.

Refuses a model whose formula is none of these. Invariant: a fused ranker computes what its graph computes, in FP16 with
sums in FP32.
"""

from __future__ import annotations

import importlib.util

from torch import fx, nn

from infra.engine.run import EngineUnavailable


def fused_ranker(module: fx.GraphModule) -> nn.Module:
    """The module (in FP32) as one kernel that takes and gives FP32. Raises EngineUnavailable."""
    if importlib.util.find_spec("triton") is None:
        raise EngineUnavailable("Triton is not installed; PyTorch for CUDA brings it")
    from infra.engine.fused_bst import fused_bst
    from infra.engine.fused_edge import fused_edge

    made = fused_bst(module) or fused_edge(module)
    if made is None:
        raise EngineUnavailable("no kernel computes this model's formula; cuda-graph computes it by operations")
    return made
