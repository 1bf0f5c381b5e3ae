"""An embedding table in host memory, compiled with numba.

One owner thread, no locks. Memory is set aside at construction (pages are touched as rows arrive) and never grows; it
may be given instead, with entries in it (`image.py`). The compiled loops are in `kernels_cpu.py`; `warm()` compiles or
loads them all, so that no request pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32, I64, U64, Op
from param_server.table import Applied, Bool, Export, RowBatch, TopK
from param_server.table import kernels_cpu as kernels
from param_server.table.capture import CpuCapture
from param_server.table.host import NO_KEYS, Index, best_rows, check_batch, look_up, plain, plain_rows

# Four cells for three rows; a key finds its cell with 32 bits.
_MOST_ROWS = 3 << 30


class Arrays(NamedTuple):
    """The memory of a table, as `kernels_cpu.py` describes it."""

    slots: U64
    keys: I64
    states: NDArray[np.uint8]
    versions: U64
    rows: F32
    stamps: NDArray[np.uint32]


class Held(NamedTuple):
    """Arrays that a table goes on from: `used` entries, `live` of them live, none changed after stamp 1."""

    arrays: Arrays
    used: int
    live: int


def layout(capacity_rows: int, dim: int) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of each of the `Arrays`. All begin as zeros."""
    return {
        "slots": (np.dtype(np.uint64), (capacity_rows * 4 // 3 + 1,)),
        "keys": (np.dtype(np.int64), (capacity_rows,)),
        "states": (np.dtype(np.uint8), (capacity_rows,)),
        "versions": (np.dtype(np.uint64), (capacity_rows,)),
        "rows": (np.dtype(np.float32), (capacity_rows, dim)),
        "stamps": (np.dtype(np.uint32), (capacity_rows,)),
    }


def _new_arrays(capacity_rows: int, dim: int) -> Arrays:
    """What need not begin as zeros is not made so: numpy then has it in larger pages."""
    arrays = {
        name: (np.zeros if name in ("slots", "states", "stamps") else np.empty)(shape, dtype)
        for name, (dtype, shape) in layout(capacity_rows, dim).items()
    }
    return Arrays(**arrays)


class CpuTable:
    """`EmbeddingTable` in host memory. `default_row` is f32[dim]; without `held` the table is empty."""

    def __init__(self, *, dim: int, capacity_rows: int, default_row: F32, held: Held | None = None) -> None:
        if not 0 < capacity_rows <= _MOST_ROWS:
            raise ValueError(f"capacity_rows is {capacity_rows}, it must be in [1, {_MOST_ROWS}]")
        if default_row.shape != (dim,):
            raise ValueError(f"default_row has shape {default_row.shape}, not ({dim},)")
        self._default_row = np.array(default_row, np.float32)
        arrays, self._used, self._live = held or Held(_new_arrays(capacity_rows, dim), 0, 0)
        shapes = [shape for _, shape in layout(capacity_rows, dim).values()]
        if [array.shape for array in arrays] != shapes:
            raise ValueError(f"the arrays are not those of a table of {capacity_rows} rows of dim {dim}")
        self._slots, self._keys, self._states, self._versions, self._rows, self._stamps = arrays
        self._stamp = 1
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

    @property
    def held(self) -> Held:
        """The table as another one may go on from it, not copied."""
        arrays = Arrays(self._slots, self._keys, self._states, self._versions, self._rows, self._stamps)
        return Held(arrays, self._used, self._live)

    @property
    def stamped(self) -> bool:
        """Whether a capture or a mark was asked for."""
        return self._stamp > 1

    def lay(self, entries: Export) -> I64 | None:
        """Make entries what is given, whatever versions they have, before the first capture; their numbers i64[n].

        None when they do not all find room; the table is of no use then.
        """
        numbers = np.empty(entries.keys.size, np.int64)
        states = np.where(entries.tombstones, kernels.TOMBSTONE, kernels.LIVE).astype(np.uint8)
        fits, self._used, self._live = kernels.lay(
            self._slots, self._keys, self._states, self._versions, self._rows.view(np.uint32), self._stamps,
            self._stamp, self._used, self._live, plain(entries.keys), np.array(entries.versions, np.uint64, order="C"),
            states, plain_rows(entries.rows).view(np.uint32), numbers,
        )  # fmt: skip
        return numbers if fits else None

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
    table.lay(table.export())
