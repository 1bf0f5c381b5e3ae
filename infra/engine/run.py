"""What an engine is: one executable form of one ranker, and the errors it may raise.

Every engine keeps this contract, whatever runs it; `infra.engine.choose` picks among them at start and
`infra.engine.chain` goes from one to the next while requests go on. Imports nothing that executes models. Invariant:
a caller of `run` never sees a score that is not a number.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Batching
from infra.errors import Permanent

F32 = NDArray[np.float32]
INPUT_NAMES = ("hist", "target", "mask", "user")


class EngineUnavailable(Permanent):
    """This machine cannot run this engine: no driver, package not installed, file absent or damaged, another GPU.
    Action: take the next one."""


class EngineDamaged(EngineUnavailable):
    """Its file is not the one that was built. Action: take the next one, and build it again."""


class NonFiniteScores(Permanent):
    """The model gave NaN or an infinity. Action: answer without this stage."""


class Engine(Protocol):
    """One ranker, ready to run after `load()`; used by one thread at a time."""

    @property
    def kind(self) -> str:
        """The value of the `engine` label: "tensorrt", "tensorrt-rtx", "cuda-kernel", "cuda-graph",
        "aotinductor", "onnxruntime-cpu" or "torch-cpu"."""

    @property
    def precision(self) -> str:
        """ "fp32", "fp16" or "int8"."""

    @property
    def batching(self) -> Batching:
        """Which batches it likes; it takes any."""

    def load(self) -> None:
        """Get ready to run. Raises EngineUnavailable, or ReleaseRefused when the file is no ranker."""

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """Logits f32[B, N] of hist f32[B, L, T], target f32[B, N, T], mask f32[B, L] (1 = real), user f32[B, U].

        Raises NonFiniteScores; shapes that the engine does not take, and everything else, raise Permanent.
        """

    def close(self) -> None:
        """Give back what `load` took; harmless before it and after another `close`."""

    def memory_bytes(self) -> int:
        """Memory that weights and buffers take, host and device together; 0 before `load`."""
