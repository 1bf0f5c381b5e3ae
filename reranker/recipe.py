"""How a release is trained: every number and every switch of the fit, as one value.

Refuses values that mean nothing, by name. Invariant: with the same recipe, seed and data, a machine computes the same
release. `workers` and `prefetch` change nothing but the time, unless the log is streamed: its parts are then shared
out among the workers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from edge_ranker.tables import SPARSE_TABLES
from edge_ranker.train import Pooling
from infra.errors import InvalidInput
from reranker.architectures import EDGE, RERANK, Architecture

AUTOMATIC = "auto"
SWITCH = (AUTOMATIC, "on", "off")
DEVICES = ("cpu", "cuda")
_AT_LEAST = {
    "batch_size": 1,
    "negatives_per_kind": 1,
    "accumulate": 1,
    "patience": 0,
    "workers": 0,
    "prefetch": 1,
    "samples": 1,
    "max_passes": 1,
    "buffer_events": 1,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of the fit; chosen on the validation stretch of MovieLens-100K. `batch_size` is that of one part."""

    batch_size: int = 128
    learning_rate: float = 6e-3
    warm_up_share: float = 0.15
    weight_decay: float = 0.1
    negatives_per_kind: int = 2
    bucket_share: float = 0.5
    recall_weight: float = 1.0
    # About this many samples are seen, whatever the size of the log, within these bounds on the passes.
    samples: int = 340_000
    max_passes: int = 40
    # Histories pooled by EmbeddingBag, or laid out token by token and averaged.
    pooling: Pooling = "bag"
    # Tables with sparse gradients: `auto` (by their rows), `none`, or names separated by commas.
    sparse: str = AUTOMATIC
    # Half precision: fp16 with a scaled loss on CUDA, bf16 on the CPU. `auto`: whatever is faster on this machine.
    amp: str = AUTOMATIC
    # Gradients of so many steps' worth of batches are added up before the optimiser steps.
    accumulate: int = 1
    # Stop after so many passes without a better one; 0: never.
    patience: int = 0
    # Processes that make batches ahead of the fit, and batches each of them makes ahead.
    workers: int = 0
    prefetch: int = 4
    device: str = "cpu"
    # Events of a streamed log that are in memory, and shuffled there, at a time.
    buffer_events: int = 2_000_000
    # Which models are trained.
    edge: Architecture = EDGE
    rerank: Architecture = RERANK

    def passes(self, n_events: int) -> int:
        """Passes over a training period of `n_events`."""
        return max(1, min(self.max_passes, round(self.samples / n_events)))

    def sparse_tables(self) -> Collection[str] | None:
        """Tables with sparse gradients, None when their rows decide."""
        if self.sparse == AUTOMATIC:
            return None
        return () if self.sparse == "none" else tuple(name.strip() for name in self.sparse.split(","))

    def checked(self) -> Recipe:
        """This recipe. Raises InvalidInput for a value that means nothing."""
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise InvalidInput(name, f"{getattr(self, name)} is too small; give {least} or more")
        for name, allowed in (("pooling", get_args(Pooling)), ("amp", SWITCH), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise InvalidInput(name, f"{getattr(self, name)!r} is unknown; give one of {', '.join(allowed)}")
        for table in self.sparse_tables() or ():
            if table not in SPARSE_TABLES:
                known = f"auto, none, or tables of {', '.join(SPARSE_TABLES)} separated by commas"
                raise InvalidInput("sparse", f"{table!r} is no table with sparse gradients; give {known}")
        return self
