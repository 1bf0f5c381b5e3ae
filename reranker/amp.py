"""Which precision a fit computes in.

CUDA: fp16 with a scaled loss. CPU: bf16 where the processor has instructions for it and the batch is large enough for
them to save more than the casts cost (measured: infra/docs/training.md). A rule and not a stopwatch, so that the same
recipe and seed give the same release on a busy machine too.
"""

from __future__ import annotations

import torch

from reranker.descent import Precision
from reranker.recipe import AUTOMATIC, Recipe

# At 128 bf16 brought between nothing and a tenth, at 512 a quarter; below, the casts cost more than they save.
BF16_FROM_BATCH = 256


def choose_precision(recipe: Recipe, *, bf16: bool) -> Precision:
    """The precision `recipe.amp` asks for; `bf16` says whether the processor computes in it."""
    half: Precision = "fp16" if recipe.device == "cuda" else "bf16"
    if recipe.amp != AUTOMATIC:
        return half if recipe.amp == "on" else "fp32"
    pays = half == "fp16" or (bf16 and recipe.batch_size >= BF16_FROM_BATCH)
    return half if pays else "fp32"


def has_bf16() -> bool:
    """Whether this processor computes in bf16."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))
