"""Rankers that a GPU computes in one kernel; needs Triton, which every build of PyTorch for CUDA brings.

Refuses nothing: a model whose formula is none of these runs operation by operation. Invariant: a fused ranker computes
what its graph computes, in FP16 with sums in FP32.
"""

from __future__ import annotations

import importlib.util

from torch import fx, nn


def fused_ranker(module: fx.GraphModule) -> nn.Module | None:
    """The module (in FP32) as one kernel that takes and gives FP32, or None when no kernel computes its formula."""
    if importlib.util.find_spec("triton") is None:
        return None
    from infra.engine.fused_bst import fused_bst
    from infra.engine.fused_edge import fused_edge

    return fused_bst(module) or fused_edge(module)
