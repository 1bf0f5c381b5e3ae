"""An embedding table in the memory of one GPU: the arrays of `gpu_arrays.py` and the Triton kernels of `kernels*.py`.

One owner thread, no locks: everything runs in the order of the current CUDA stream, so a lookup sees a batch whole or
not at all. Rows are f32, f16, bf16, or bytes with a scale per row; a number too large for the type becomes its largest.

A table either holds every key up to its capacity, or evicts (`evicting=True`): then a key lies in its home bucket only,
`upsert` pushes out the row of least score and returns it, and `apply` writes resident keys and reports the others in
`full`. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set before import): exact, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from param_server.contract import F32, I64
from param_server.table import Applied, Bool, Export, RowBatch, TopK
from param_server.table.gpu_arrays import Arrays, Dtype, buckets_for, carve, keys_of
from param_server.table.gpu_capture import GpuCapture, gather, rows_at
from param_server.table.gpu_graph import LookupGraphs
from param_server.table.gpu_host import device_of_process, to_device, to_host
from param_server.table.gpu_topk import best_rows, warm
from param_server.table.gpu_write import Writer
from param_server.table.kernels import find_kernel, lookup_kernel
from param_server.table.tier import Entries

# Above this load a search visits several buckets; below it memory lies idle.
_LOAD = 0.9
# Few keys: more programs shorten the longest search. Many: a thread for each key.
_FEW_KEYS = 16384
_TILE_BYTES = 8192
_EXPORT_SLOTS = 1 << 22
_TOMBSTONE = 2


class GpuTable:
    """`EmbeddingTable` in GPU memory. `default_row` is f32[dim]; `arrays` may come from a shared arena (`carve`)."""

    def __init__(
        self, *, dim: int, capacity_rows: int, default_row: F32, dtype: Dtype = "f32", evicting: bool = False,
        arrays: Arrays | None = None,
    ) -> None:  # fmt: skip
        if default_row.shape != (dim,):
            raise ValueError(f"default_row has shape {default_row.shape}, not ({dim},)")
        if capacity_rows <= 0:
            raise ValueError(f"capacity_rows is {capacity_rows}, it must be positive")
        device = device_of_process()
        if arrays is None:
            slots = capacity_rows if evicting else slots_for(capacity_rows)
            arrays = carve([buckets_for(slots)], dim, dtype, device, evicting=evicting)[0]
        self._arrays = arrays
        self._dim = dim
        self._evicting = evicting
        self._capacity = arrays.n_slots if evicting else capacity_rows
        self._default = torch.from_numpy(np.array(default_row, np.float32)).to(device)
        self._defaults = {torch.float32: self._default}
        self._writer = Writer(arrays, dim, self._capacity, evicting=evicting)
        self._graphs: LookupGraphs | None = None

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._dim

    @property
    def size(self) -> int:
        """Live rows."""
        return self._writer.live

    @property
    def tombstones(self) -> int:
        """Deleted keys whose version is remembered."""
        return self._writer.used - self._writer.live

    @property
    def capacity_rows(self) -> int:
        """Most live rows and tombstones together."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """Memory set aside, index included."""
        return self._arrays.bytes

    @property
    def arrays(self) -> Arrays:
        """The memory of the table, for whoever measures it."""
        return self._arrays

    @property
    def writer(self) -> Writer:
        """Writes in their parts: staged ahead of time by another thread, or already on the device."""
        return self._writer

    def warm(self, most_keys: int = 4096) -> None:
        """Compile what lookups, recalls and writes call; capture lookups of up to `most_keys` keys. Takes seconds."""
        self.lookup(np.zeros(1, np.int64))
        self.warm_recall()
        if self._arrays.words.is_cuda:
            self._graphs = LookupGraphs(self.lookup_device, self._dim, most_keys)
            self._graphs.capture()
        self._writer.warm()

    def warm_recall(self) -> None:
        """Compile what `topk` calls."""
        warm(self._arrays, self._dim)
        rows_at(self._arrays, torch.zeros(1, dtype=torch.int64, device=self._arrays.words.device), self._dim)

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
        if self._graphs is not None and 0 < keys.size <= self._graphs.most_keys:
            return self._graphs.lookup(keys)
        device = self._arrays.words.device
        wanted = to_device(keys, np.int64, device)
        out = torch.empty((keys.size, self._dim), dtype=torch.float32, device=device)
        found = torch.empty(keys.size, dtype=torch.uint8, device=device)
        self.lookup_device(wanted, out, found)
        rows, flags = to_host([out, found])
        return rows, flags.view(np.bool_)

    def lookup_device(self, keys: Tensor, out: Tensor, found: Tensor) -> None:
        """Fill out[n, dim] (f32 or the table's type) and found u8[n] for keys i64[n], on the device; never waits."""
        n = keys.numel()
        if n == 0:
            return
        a = self._arrays
        block_d = triton.next_power_of_2(self._dim)
        most = max(1, min(32, _TILE_BYTES // (block_d * a.rows.element_size())))
        k = min(8, most) if n <= _FEW_KEYS else most
        lookup_kernel[(triton.cdiv(n, k),)](
            keys, out, found, a.words, a.rows, a.scales, self._default_as(out.dtype), n, a.n_buckets,
            D=self._dim, BLOCK_D=block_d, K=k, CHAIN=not self._evicting, SCALED=a.scales is not None, num_warps=1,
        )  # fmt: skip

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch. Raises ValueError when its arrays do not fit this table."""
        return self._writer.apply(batch)

    def upsert(self, batch: RowBatch, scores: NDArray[np.uint32]) -> tuple[Applied, Entries]:
        """Assign rows to an evicting table with scores u32[n] (2^32 - 1 pins), and return what had to leave.

        `full` holds the positions whose whole bucket is pinned or written by this batch. Raises ValueError as `apply`.
        """
        return self._writer.upsert(batch, scores)

    def touch(self, keys: I64, score: int) -> None:
        """Give the resident ones of keys i64[n] a new score: what LRU does after a lookup. Evicting tables only."""
        if not self._evicting:
            raise ValueError("only an evicting table has scores")
        slots = self.find_device(to_device(keys, np.int64, self._arrays.words.device))
        self._arrays.scores[slots[slots >= 0]] = int(np.uint32(score).view(np.int32))

    def find_device(self, keys: Tensor) -> Tensor:
        """Slots i64[n] of live keys i64[n] on the device, -1 for the others."""
        a = self._arrays
        slots = torch.empty_like(keys)
        if keys.numel():
            find_kernel[(triton.cdiv(keys.numel(), 32),)](
                keys, slots, a.words, keys.numel(), a.n_buckets, K=32, CHAIN=not self._evicting, num_warps=1
            )
        return slots

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim]; `exclude` as in the protocol."""
        if exclude and len(exclude) != len(queries):
            raise ValueError(f"{len(exclude)} exclusions for {len(queries)} queries")
        k = max(k, 0)
        # Whatever is excluded can push out no more than its own number.
        want = min(k + max((keys.size for keys in exclude), default=0), self.size)
        if want == 0 or k == 0:
            empty = np.empty(0, np.float32)
            return [TopK(np.empty(0, np.int64), empty, np.empty((0, self._dim), np.float32)) for _ in queries]
        best = best_rows(self._arrays, np.ascontiguousarray(queries, np.float32), want)
        kept = [_left(one.keys, exclude[i] if exclude else None)[:k] for i, one in enumerate(best)]
        slots = np.concatenate([one.slots[some] for one, some in zip(best, kept, strict=True)])
        at = to_device(slots, np.int64, self._arrays.words.device)
        (rows,) = to_host([rows_at(self._arrays, at, self._dim)])
        answers = []
        for one, some in zip(best, kept, strict=True):
            keys = one.keys[some]
            answers.append(TopK(keys, one.scores[some], rows[: keys.size]))
            rows = rows[keys.size :]
        return answers

    def gather_device(self, slots: Tensor, out: Tensor) -> None:
        """Fill out[n, dim] (f32 or the table's type) with the rows at slots i64[n], zeros where they are negative."""
        gather(self._arrays, slots, out)

    def mark(self) -> int:
        """Return a number to capture from: what changes from now on is in `capture(number)`."""
        return self._writer.changes.mark()

    def capture(self, since: int = 0) -> GpuCapture:
        """Begin a copy of this moment: all entries, or those changed after `since`. Ends the capture before."""
        return self._writer.changes.capture(since)

    def export(self, since_version: int = 0) -> Export:
        """Return copies of every entry whose version is at least `since_version`, tombstones included."""
        parts = [self._export(first, since_version) for first in range(0, self._arrays.n_slots, _EXPORT_SLOTS)]
        keys, versions, tombstones, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Export(keys, versions.view(np.uint64), tombstones, rows)

    def _export(self, first: int, since_version: int) -> list[NDArray[np.generic]]:
        a = self._arrays
        part = slice(first, first + _EXPORT_SLOTS)
        state = a.words[part] >> 62 & 3
        chosen = (state == 1) | (state == _TOMBSTONE)
        if since_version > 0:
            # Unsigned order is signed order with the top bit turned.
            chosen &= (a.versions[part] ^ (-(2**63))) >= since_version - 2**63
        slots = chosen.nonzero()[:, 0] + first
        words = a.words[slots]
        dead = (words >> 62 & 3) == _TOMBSTONE
        rows = rows_at(a, torch.where(dead, -1, slots), self._dim)
        return to_host([keys_of(words, slots, a.n_buckets), a.versions[slots], dead, rows])

    def _default_as(self, kind: torch.dtype) -> Tensor:
        if kind not in self._defaults:
            self._defaults[kind] = self._default.to(kind)
        return self._defaults[kind]


def slots_for(capacity_rows: int) -> int:
    """Places of a table that holds so many rows."""
    return int(capacity_rows / _LOAD) + 1


def _left(keys: I64, exclude: I64 | None) -> I64:
    """Positions of the keys that are not excluded."""
    return np.arange(keys.size) if exclude is None else np.flatnonzero(~np.isin(keys, exclude))
