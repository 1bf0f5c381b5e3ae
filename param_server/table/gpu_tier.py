"""The hot tier on a GPU: `TierTable` over an evicting `GpuTable`.

A key lies in its home bucket of eight or nowhere, so what leaves is the least wanted of eight, and "no room" is said of
a bucket: `capacity_rows` is reached only when every bucket is full, and nothing is sure to find room. Refuses
tombstones that come from elsewhere: they are `full`, and stay a tier below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from param_server.contract import F32, I64, Op
from param_server.eviction import GAIN_STEP, KEEP, PINNED, U32, Policy, gains
from param_server.table import Applied, Bool, Capture, Export, RowBatch, TopK
from param_server.table.gpu import GpuTable
from param_server.table.gpu_arrays import LANES, Arrays, keys_of
from param_server.table.gpu_graph import LookupGraphs
from param_server.table.gpu_host import to_device, to_host
from param_server.table.kernels_tier import renew_kernel
from param_server.table.tier import Entries, Upserted, room_for

_KEYS = 32
_EXPIRE_AT_ONCE = 1 << 18
_SAMPLE = 4096
_WINDOW_BUCKETS = 64
_U32 = 0xFFFFFFFF


class GpuTierTable:
    """`TierTable` in GPU memory, f32 rows. `default_row` is f32[dim]; it has `slots` places, or a few more."""

    def __init__(self, *, dim: int, slots: int, default_row: F32, policy: Policy) -> None:
        self._table = GpuTable(dim=dim, capacity_rows=slots, default_row=default_row, evicting=True)
        self._policy = policy
        device = self._arrays.words.device
        self._gains = to_device(gains(), np.uint32, device)
        # The kernel reads it where it is: a copy would be one launch more.
        self._tick = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._graphs: LookupGraphs | None = None
        self._expired_to = 0
        self._window = 0

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._table.dim

    @property
    def size(self) -> int:
        """Live rows."""
        return self._table.size

    @property
    def tombstones(self) -> int:
        """Deleted keys whose version is remembered."""
        return self._table.tombstones

    @property
    def capacity_rows(self) -> int:
        """Most live rows and tombstones together."""
        return self._table.capacity_rows

    @property
    def room(self) -> int:
        """Rows that are sure to find room: none, as each has eight places only."""
        return 0

    @property
    def bytes(self) -> int:
        """Memory set aside, index included."""
        return self._table.bytes

    @property
    def _arrays(self) -> Arrays:
        return self._table.arrays

    def warm(self, most_keys: int = 4096) -> None:
        """Compile what is called, and capture visits of up to `most_keys` keys; takes seconds."""
        self._table.writer.warm()
        self._table.warm_recall()
        self.lookup(np.zeros(1, np.int64))
        self.visit(np.zeros(1, np.int64), 0)
        if self._arrays.words.is_cuda:
            self._graphs = LookupGraphs(self._visit_device, self.dim, most_keys)
            self._graphs.capture()

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
        return self._table.lookup(keys)

    def visit(self, keys: I64, tick: int) -> tuple[F32, Bool, int]:
        """The same, which counts as a use at `tick`; and how many were found. A key asked for twice may count once."""
        self._tick[0] = tick
        if self._graphs is not None and 0 < keys.size <= self._graphs.most_keys:
            rows, found = self._graphs.lookup(keys)
        else:
            device = self._arrays.words.device
            wanted = to_device(keys, np.int64, device)
            out = torch.empty((keys.size, self.dim), dtype=torch.float32, device=device)
            flags = torch.empty(keys.size, dtype=torch.uint8, device=device)
            self._visit_device(wanted, out, flags)
            rows, there = to_host([out, flags])
            found = there.view(np.bool_)
        return rows, found, int(np.count_nonzero(found))

    def apply(self, batch: RowBatch) -> Applied:
        """Write to the keys that are held; others are `full`. Raises ValueError when arrays do not fit this table."""
        return self._table.apply(batch)

    def upsert(self, entries: Entries, *, force: bool) -> Upserted:
        """Write entries, evicting where there is no room; as in the protocol. Tombstones find none."""
        dead = np.flatnonzero(entries.tombstones)
        live = np.flatnonzero(~entries.tombstones) if dead.size else slice(None)
        batch = RowBatch(Op.ASSIGN, entries.keys[live], entries.versions[live], entries.rows[live])
        done, gone = self._table.writer.upsert(batch, entries.scores[live], entries.dirty[live], force=force)
        full = done.full if isinstance(live, slice) else np.sort(np.concatenate([live[done.full], dead]))
        return Upserted(done.applied, done.stale, full, gone)

    def remove(self, keys: I64, above: int = -1) -> Entries:
        """Take out those of keys that are held with a score greater than `above`."""
        return self._table.writer.remove(keys, above)

    def bury(self, keys: I64) -> Entries:
        """Take out those of keys that are held as tombstones."""
        return self._table.writer.remove(keys, dead=True) if self.tombstones else room_for(0, self.dim)

    def expire(self, below: int) -> Entries:
        """Take out rows of a lesser score from among the next slots."""
        a = self._arrays
        start = self._expired_to if self._expired_to < a.n_slots else 0
        end = self._expired_to = min(start + _EXPIRE_AT_ONCE, a.n_slots)
        old = (a.words[start:end] != 0) & (_unsigned(a.scores[start:end]) < below)
        slots = old.nonzero()[:, 0] + start
        (keys,) = to_host([keys_of(a.words[slots], slots, a.n_buckets)])
        return self.remove(keys)

    def weakest(self) -> int:
        """Median over a few buckets of the least score of each; -1 where the buckets have room."""
        a = self._arrays
        buckets = min(_WINDOW_BUCKETS, a.n_buckets)
        first = self._window if self._window + buckets <= a.n_buckets else 0
        self._window = first + buckets
        part = slice(first * LANES, (first + buckets) * LANES)
        scores = torch.where(a.words[part] == 0, -1, _unsigned(a.scores[part]))
        (least,) = to_host([scores.view(buckets, LANES).amin(1)])
        return int(np.median(least))

    def hottest(self, n: int) -> tuple[I64, U32]:
        """About the `n` live keys of greatest score, greatest first: the cut is found in a sample."""
        a = self._arrays
        live = (a.words >> 62 & 3) == 1
        if n < self.size:
            step = max(1, a.n_slots // _SAMPLE)
            (sample,) = to_host([torch.where(live[::step], _unsigned(a.scores[::step]), -1)])
            kept = max(1, min(sample.size, n * sample.size // a.n_slots))
            live &= _unsigned(a.scores) >= int(np.partition(sample, -kept)[-kept])
        slots = live.nonzero()[:, 0]
        keys, scores = to_host([keys_of(a.words[slots], slots, a.n_buckets), a.scores[slots]])
        found: U32 = scores.view(np.uint32)
        best = np.argsort(-found.astype(np.int64), kind="stable")[:n]
        return keys[best], found[best]

    def pin(self, keys: I64) -> None:
        """Keep those of keys that are held."""
        self._table.touch(keys, PINNED)

    def soil(self) -> None:
        """Take every row for changed."""
        self._arrays.stamps.bitwise_or_(1)

    def capture_all(self) -> Capture:
        """Begin a copy of this moment, to be taken in pieces while the table changes. Ends the one before."""
        return self._table.capture()

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim]; `exclude` as in the protocol."""
        return self._table.topk(queries, k, exclude)

    def export(self, since_version: int = 0) -> Export:
        """Return copies of every entry whose version is at least `since_version`, tombstones included."""
        return self._table.export(since_version)

    def _visit_device(self, keys: Tensor, out: Tensor, found: Tensor) -> None:
        self._table.lookup_device(keys, out, found)
        n = keys.numel()
        if n == 0 or self._policy.mode == KEEP:
            return
        a = self._arrays
        renew_kernel[(triton.cdiv(n, _KEYS),)](
            keys, self._tick, self._gains, a.words, a.scores, n, a.n_buckets,
            K=_KEYS, FREQUENT=self._policy.kind == "lfu", N_GAINS=self._gains.numel(), GAIN_STEP=GAIN_STEP, num_warps=1,
        )  # fmt: skip


def _unsigned(scores: Tensor) -> Tensor:
    """Bits of u32 as i64."""
    return scores.to(torch.int64) & _U32
