"""An engine whose work is done in buckets by lanes: what the TensorRT runner and PyTorch's CUDA graphs have in common.

A request takes a lane, is cut into pieces, each piece is copied to the GPU, computed and copied back by that lane.
Refuses other widths than the model's, and scores that are not finite. Invariant: any number of threads may `run` at
once; `close` frees nothing that one of them still uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.engine.buckets import Bucket, Grid
from infra.engine.pool import Pool, Usage
from infra.engine.run import NonFiniteScores
from infra.errors import Permanent

F32 = NDArray[np.float32]

# A run takes about a millisecond: who waits this long for a lane waits for a GPU that is stuck.
WAIT_S = 5.0


class Lane(Protocol):
    """One request in flight: a stream and static buffers."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Make everything that scoring these will need, largest first."""

    def score(self, bucket: Bucket, part: Features) -> F32:
        """Logits f32[bucket.batch, bucket.candidates], valid until the next call, of a part that fits the bucket."""


class Session(Protocol):
    """A loaded model."""

    @property
    def widths(self) -> tuple[int, int]:
        """Of a token and of a user, 0 when the model takes none."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """All of them."""

    def memory_bytes(self) -> int:
        """Of weights and buffers, host and device."""

    def close(self) -> None:
        """Free everything; no lane is in use."""


class BucketedEngine:
    """An `Engine` over a session that `open_session` makes when it is loaded."""

    def __init__(
        self, kind: str, precision: str, open_session: Callable[[Grid], Session], *, grid: Grid | None = None
    ) -> None:
        self.kind = kind
        self.precision = precision
        self._open_session = open_session
        self.batching = self._grid = grid or Grid()
        self._session: Session | None = None
        self._pool: Pool[Lane] = Pool(())
        self._counts = threading.Lock()
        self._real = self._computed = 0

    def load(self) -> None:
        """Open the session and prepare every bucket on every lane, so that no request pays for it. Raises what
        `open_session` raises: EngineUnavailable, ReleaseRefused."""
        self._loaded()

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """Logits f32[B, N]. Raises NonFiniteScores, Permanent, and Overloaded when every lane is taken."""
        session = self._session or self._loaded()
        if session.widths[1] == 0:
            user = user[:, :0]
        _check_widths(session.widths, Features(hist, target, mask, user))
        (n_batch, n_candidates), length = target.shape[:2], hist.shape[1]
        scores = np.empty((n_batch, n_candidates), np.float32)
        pieces = self._grid.cut(n_batch, length, n_candidates)
        with self._pool.lane(WAIT_S) as lane:
            for piece in pieces:
                rows, items = slice(piece.first, piece.last), slice(piece.start, piece.end)
                part = Features(hist[rows], target[rows, items], mask[rows], user[rows])
                made = lane.score(piece.bucket, part)
                scores[rows, items] = made[: piece.last - piece.first, : piece.end - piece.start]
        with self._counts:
            self._real += scores.size
            self._computed += sum(piece.bucket.batch * piece.bucket.candidates for piece in pieces)
        if not np.isfinite(scores).all():
            raise NonFiniteScores(f"{self.kind}: scores are not finite")
        return scores

    def close(self) -> None:
        """Wait for what is running, then free everything. Raises Overloaded when it does not end."""
        session, self._session = self._session, None
        if session is not None:
            self._pool.close(WAIT_S)
            session.close()

    def memory_bytes(self) -> int:
        """Of weights and buffers; 0 before `load`."""
        return 0 if self._session is None else self._session.memory_bytes()

    def usage(self) -> Usage:
        """What the lanes are doing."""
        return self._pool.usage()

    def padding(self) -> float:
        """Share of the computed scores that nobody asked for, since the start."""
        return 1.0 - self._real / self._computed if self._computed else 0.0

    def _loaded(self) -> Session:
        session = self._open_session(self._grid)
        try:
            for lane in session.lanes:
                lane.prepare(self._grid.buckets())
        except BaseException:
            session.close()
            raise
        self._session, self._pool = session, Pool(session.lanes)
        return session


def _check_widths(widths: tuple[int, int], given: Features) -> None:
    """Raises Permanent unless the inputs are one batch of the model's widths."""
    (token_dim, user_dim), (n, length) = widths, given.hist.shape[:2]
    candidates = given.target.shape[1]
    for name, array, shape in (
        ("hist", given.hist, (n, length, token_dim)),
        ("target", given.target, (n, candidates, token_dim)),
        ("mask", given.mask, (n, length)),
        ("user", given.user, (n, user_dim)),
    ):
        if array.shape != shape or array.dtype != np.float32:
            raise Permanent(f"{name}: f32{list(shape)} is needed, not {array.dtype}{list(array.shape)}")
