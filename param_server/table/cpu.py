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
from param_server.table.host import NO_KEYS, Index, best_rows, check_batch, look_up, plain, plain_rows

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

    @property
    def _index(self) -> Index:
        return Index(self._slots, self._keys, self._states, self._rows)

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
        return look_up(self._index, keys, self._default_row)

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch. Raises ValueError when its arrays do not fit this table."""
        check_batch(batch, self.dim)
        n = batch.keys.size
        adding = batch.op is Op.ADD
        refused = np.zeros(n, np.uint8)
        keys = plain(batch.keys)
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
            plain_rows(batch.rows),
            batch.versioned_rows if adding else batch.op is Op.DELETE,
            refused,
        )
        if applied + stale == n:
            return Applied(applied, stale, NO_KEYS, NO_KEYS)
        return Applied(
            applied, stale, np.flatnonzero(refused == kernels.FULL), np.flatnonzero(refused == kernels.OVERFLOW)
        )

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim]; `exclude` as in the protocol."""
        return best_rows(self._index, self._used, queries, k, exclude)

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
