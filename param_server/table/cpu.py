"""An embedding table in host memory, compiled with numba.

One owner thread, no locks. Memory is set aside at construction (pages are touched as rows arrive) and never grows. The
compiled loops are in `kernels_cpu.py`; `warm()` compiles or loads them all, so that no request pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from param_server.contract import F32, I64, Op
from param_server.table import Applied, Bool, Export, RowBatch, TopK
from param_server.table import kernels_cpu as kernels
from param_server.table.capture import CpuCapture

_NO_KEYS = np.empty(0, np.int64)
# Four cells for three rows; a key finds its cell with 32 bits.
_MOST_ROWS = 3 << 30


class CpuTable:
    """`EmbeddingTable` in host memory. `default_row` is f32[dim]."""

    def __init__(self, *, dim: int, capacity_rows: int, default_row: F32) -> None:
        if not 0 < capacity_rows <= _MOST_ROWS:
            raise ValueError(f"capacity_rows is {capacity_rows}, it must be in [1, {_MOST_ROWS}]")
        if default_row.shape != (dim,):
            raise ValueError(f"default_row has shape {default_row.shape}, not ({dim},)")
        self._default_row = np.array(default_row, np.float32)
        self._slots = np.zeros(capacity_rows * 4 // 3 + 1, np.uint64)
        self._keys = np.empty(capacity_rows, np.int64)
        self._states = np.zeros(capacity_rows, np.uint8)
        self._versions = np.empty(capacity_rows, np.uint64)
        self._rows = np.empty((capacity_rows, dim), np.float32)
        self._stamps = np.zeros(capacity_rows, np.uint32)
        self._stamp = 1
        self._used = 0
        self._live = 0
        self._capture: CpuCapture | None = None

    @property
    def dim(self) -> int:
        """Width of a row."""
        return int(self._rows.shape[1])

    @property
    def size(self) -> int:
        """Live rows."""
        return self._live

    @property
    def tombstones(self) -> int:
        """Deleted keys whose version is remembered."""
        return self._used - self._live

    @property
    def capacity_rows(self) -> int:
        """Most live rows and tombstones together."""
        return int(self._keys.size)

    @property
    def bytes(self) -> int:
        """Memory set aside, index included."""
        arrays = (self._slots, self._keys, self._states, self._versions, self._rows, self._stamps)
        return sum(array.nbytes for array in arrays)

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
        rows = np.empty((keys.size, self.dim), np.float32)
        found = np.empty(keys.size, np.bool_)
        kernels.lookup(self._slots, self._keys, self._states, self._rows, _plain(keys), self._default_row, rows, found)
        return rows, found

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch. Raises ValueError when its arrays do not fit this table."""
        n = batch.keys.size
        if batch.rows.shape != (0 if batch.op is Op.DELETE else n, self.dim) or batch.versions.size != n:
            raise ValueError(f"{n} keys, {batch.versions.size} versions, rows {batch.rows.shape}, dim {self.dim}")
        adding = batch.op is Op.ADD
        refused = np.zeros(n, np.uint8)
        keys = _plain(batch.keys)
        if self._capture is not None:
            self._capture.save(keys)
        applied, stale, self._used, self._live = (kernels.add if adding else kernels.assign)(
            self._slots,
            self._keys,
            self._states,
            self._versions,
            self._rows,
            self._stamps,
            self._stamp,
            self._used,
            self._live,
            keys,
            np.array(batch.versions, np.uint64, order="C"),
            _rows(batch.rows),
            batch.versioned_rows if adding else batch.op is Op.DELETE,
            refused,
        )
        if applied + stale == n:
            return Applied(applied, stale, _NO_KEYS, _NO_KEYS)
        return Applied(
            applied, stale, np.flatnonzero(refused == kernels.FULL), np.flatnonzero(refused == kernels.OVERFLOW)
        )

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim]; `exclude` as in the protocol.

        One product per query, not one for all: the answer to a query must not depend on which others came with it.
        """
        if exclude and len(exclude) != len(queries):
            raise ValueError(f"{len(exclude)} exclusions for {len(queries)} queries")
        return [self._topk(q, k, exclude[i] if exclude else _NO_KEYS) for i, q in enumerate(queries)]

    def _topk(self, query: F32, k: int, exclude: I64) -> TopK:
        # A row or query of huge numbers may overflow: such a score is infinite and never wins.
        with np.errstate(all="ignore"):
            scores = self._rows[: self._used] @ query
        ranks = np.empty(self._used, np.uint64)
        count = kernels.rank(scores, self._slots, self._keys, self._states, self._used, _plain(exclude), ranks)
        ranks = ranks[:count]
        k = min(max(k, 0), count)
        if 0 < k < count:
            ranks.partition(k - 1)
        ranks[:k].sort()
        best = kernels.settle(ranks[:k], ranks[k:], self._slots, self._keys)
        return TopK(self._keys[best], scores[best], self._rows[best])

    def export(self, since_version: int = 0) -> Export:
        """Return copies of every entry whose version is at least `since_version`, tombstones included."""
        versions = self._versions[: self._used]
        chosen = slice(0, self._used) if since_version <= 0 else np.flatnonzero(versions >= since_version)
        return Export(
            self._keys[chosen].copy(),
            self._versions[chosen].copy(),
            self._states[chosen] == kernels.TOMBSTONE,
            self._rows[chosen].copy(),
        )

    def mark(self) -> int:
        """Return a number to capture from: what changes from now on is in `capture(number)`."""
        number = self._stamp
        self._stamp += 1
        return number

    def capture(self, since: int = 0) -> CpuCapture:
        """Begin a copy of this moment: all entries, or those changed after `since`. Ends the capture before."""
        self._capture = CpuCapture(
            (self._slots, self._keys, self._states, self._versions, self._rows, self._stamps),
            since, self.mark(), self._used,
        )  # fmt: skip
        return self._capture


def warm() -> None:
    """Compile, or load from numba's cache, everything a table will call."""
    table = CpuTable(dim=1, capacity_rows=4, default_row=np.zeros(1, np.float32))
    keys = np.arange(2, dtype=np.int64)
    versions = np.ones(2, np.uint64)
    rows = np.ones((2, 1), np.float32)
    for op in (Op.ASSIGN, Op.ADD):
        table.apply(RowBatch(op, keys, versions, rows))
        table.capture()
    table.apply(RowBatch(Op.ASSIGN, keys, versions, rows))
    table.capture().take(1)
    table.lookup(keys)
    table.topk(rows, 2, (keys[:1], keys[:0]))


def _plain(keys: I64) -> I64:
    """The one memory layout the kernels are compiled for; what comes from the wire is read-only."""
    return np.array(keys, np.int64, order="C")


def _rows(rows: F32) -> F32:
    return np.require(rows, np.float32, ["C", "A", "W"])
