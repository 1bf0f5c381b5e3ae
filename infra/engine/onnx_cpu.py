"""One exported model, run on the CPU by ONNX Runtime.

Refuses a model whose inputs or output are not those of a ranker, and scores that are not numbers: a caller never sees
NaN. Invariant: one `run` uses `threads` threads and no more, so that replicas of a small machine do not fight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from infra.engine.batch import Padded
from infra.engine.run import INPUT_NAMES, EngineUnavailable, NonFiniteScores
from infra.errors import Permanent, ReleaseRefused

F32 = NDArray[np.float32]


class OnnxEngine:
    """A ranker model: `run` maps one padded batch to logits. Loaded by `load()`, or by the first `run`."""

    kind = "onnxruntime-cpu"
    batching = Padded()

    def __init__(self, path: Path | str, threads: int = 1, *, precision: str = "fp32") -> None:
        self.precision = precision
        self._path = Path(path)
        self._threads = threads
        self._session: ort.InferenceSession | None = None
        self._inputs: tuple[str, ...] = ()

    def load(self) -> None:
        """Read and optimise the model. Raises EngineUnavailable without the file, ReleaseRefused when it is no
        ranker."""
        if not self._path.is_file():
            raise EngineUnavailable(f"{self._path}: there is no such file")
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ReleaseRefused(f"{self._path}: ONNX Runtime cannot load it: {error}") from error
        names = tuple(i.name for i in session.get_inputs())
        if not set(names) <= set(INPUT_NAMES) or "target" not in names or len(session.get_outputs()) != 1:
            raise ReleaseRefused(f"{self._path}: inputs {names} are not those of a ranker {INPUT_NAMES}")
        self._session, self._inputs = session, names

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """Logits f32[B, N] of hist [B, L, T], target [B, N, T], mask [B, L], user [B, U].

        Raises NonFiniteScores; shapes that the model does not take raise Permanent.
        """
        if self._session is None:
            self.load()
        given = {"hist": hist, "target": target, "mask": mask, "user": user}
        try:
            scores = self._session.run(None, {name: given[name] for name in self._inputs})[0]  # type: ignore[union-attr]
        except Exception as error:
            raise Permanent(f"{self._path.name}: {error}") from error
        logits = np.asarray(scores, np.float32).reshape(target.shape[:2])
        if not np.isfinite(logits).all():
            raise NonFiniteScores(f"{self._path.name}: scores are not finite")
        return logits

    def close(self) -> None:
        """Forget the session."""
        self._session = None

    def memory_bytes(self) -> int:
        """The weights, as large as the file that holds them; ONNX Runtime does not tell its arena."""
        return 0 if self._session is None else self._path.stat().st_size
