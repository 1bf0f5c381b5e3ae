"""Engines that fail when told to, each the real ONNX engine until then; and a check of recorded requests for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from infra.engine.choose import EngineDisagrees, Offer
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import Engine, EngineUnavailable

F32 = np.ndarray
TOKEN, USER = 8, 4


def batch(n_requests: int = 1, length: int = 3, n: int = 5, seed: int = 0) -> tuple[F32, F32, F32, F32]:
    """A padded batch of random requests."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((n_requests, length, TOKEN), np.float32),
        rng.standard_normal((n_requests, n, TOKEN), np.float32),
        np.ones((n_requests, length), np.float32),
        rng.standard_normal((n_requests, USER), np.float32),
    )


class Fuse:
    """What an engine does at the next run; shared by every engine made of one offer."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        # Runs wait for this while it is there.
        self.hangs: threading.Event | None = None
        self.not_finite = False
        self.unavailable = ""
        self.wrong_by = 0.0
        # Engines made up to this one are gone; one made afresh is not.
        self.gone = 0
        self.made = 0
        self.runs = 0
        self.closed = 0


class FusedEngine:
    """The real engine behind a fuse."""

    def __init__(self, path: Path, fuse: Fuse, kind: str, precision: str) -> None:
        self.kind, self.precision = kind, precision
        self._engine = OnnxEngine(path)
        self.batching = self._engine.batching
        self._fuse = fuse
        fuse.made += 1
        self._number = fuse.made

    def load(self) -> None:
        if self._fuse.unavailable:
            raise EngineUnavailable(self._fuse.unavailable)
        self._engine.load()

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        self._fuse.runs += 1
        if self._fuse.hangs is not None:
            self._fuse.hangs.wait(30)
        if self._fuse.raises is not None:
            raise self._fuse.raises
        if self._number <= self._fuse.gone:
            raise RuntimeError("the session is gone")
        if self._fuse.not_finite:
            # As a model whose weights went bad does.
            target = target * np.float32(np.nan)
        return self._engine.run(hist, target, mask, user) + np.float32(self._fuse.wrong_by)

    def close(self) -> None:
        self._fuse.closed += 1
        self._engine.close()

    def memory_bytes(self) -> int:
        return self._engine.memory_bytes()


def offer(path: Path, fuse: Fuse, kind: str, precision: str = "fp32", *, heavy: bool = False) -> Offer:
    """An offer of a fused engine."""
    return Offer(kind, precision, lambda: FusedEngine(path, fuse, kind, precision), heavy)


class FormulaCheck:
    """Recorded requests whose scores are those of a sound engine over `path`."""

    def __init__(self, path: Path) -> None:
        self._batch = batch(2, seed=9)
        self._expected = OnnxEngine(path).run(*self._batch)
        self.seconds_of: Callable[[Engine], float] = lambda engine: 1.0

    def whole(self, engine: Engine) -> None:
        self.quick(engine)

    def quick(self, engine: Engine) -> None:
        if not np.allclose(engine.run(*self._batch), self._expected, atol=1e-3):
            raise EngineDisagrees("other scores than recorded")

    def seconds(self, engine: Engine) -> float:
        return self.seconds_of(engine)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
