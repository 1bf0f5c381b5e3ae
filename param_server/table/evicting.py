"""A table in host memory that loses its least wanted rows: `TierTable` with numba.

One owner thread, no locks; memory is set aside at construction. The victim of an eviction is the least of a window of
`kernels_evicting.WINDOW` entries, and the windows go round, so evicting costs the same however large the table is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32, I64, Op
from param_server.eviction import PINNED, U32, Policy, gains
from param_server.table import Applied, Bool, Export, RowBatch, TopK
from param_server.table import kernels_cpu as kernels
from param_server.table import kernels_evicting as evicting
from param_server.table.evicting_capture import EvictingCapture
from param_server.table.host import NO_KEYS, Index, as_is, best_rows, check_batch, look_up, plain, plain_rows
from param_server.table.tier import Entries, Upserted, room_for

_EXPIRE_AT_ONCE = 4096
_SAMPLE = 4096
_MOST_MARKS = 2**32 - 1


class EvictingTable:
    """`TierTable` in host memory. `default_row` is f32[dim]."""

    def __init__(self, *, dim: int, capacity_rows: int, default_row: F32, policy: Policy) -> None:
        if not 0 < capacity_rows < 2**31:
            raise ValueError(f"capacity_rows is {capacity_rows}, it must be in [1, {2**31})")
        if default_row.shape != (dim,):
            raise ValueError(f"default_row has shape {default_row.shape}, not ({dim},)")
        self._default_row = np.array(default_row, np.float32)
        self._mode = policy.mode
        self._gains = gains()
        self._slots = np.zeros(_cells(capacity_rows), np.uint64)
        self._keys = np.empty(capacity_rows, np.int64)
        self._states = np.zeros(capacity_rows, np.uint8)
        self._versions = np.empty(capacity_rows, np.uint64)
        self._rows = np.empty((capacity_rows, dim), np.float32)
        self._scores = np.empty(capacity_rows, np.uint32)
        self._stamps = np.empty(capacity_rows, np.uint32)
        self._marks = np.zeros(capacity_rows, np.uint32)
        self._free = np.empty(capacity_rows, np.int64)
        self._n_free = 0
        self._used = 0
        self._live = 0
        self._hand = 0
        self._mark = 0
        self._expired_to = 0
        self._number = 1
        self._capture: EvictingCapture | None = None

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
        return self._used - self._n_free - self._live

    @property
    def capacity_rows(self) -> int:
        """Most live rows and tombstones together."""
        return int(self._keys.size)

    @property
    def room(self) -> int:
        """Entries that would still fit."""
        return self.capacity_rows - self._used + self._n_free

    @property
    def bytes(self) -> int:
        """Memory set aside, index included."""
        return bytes_for(self.capacity_rows, self.dim)

    @property
    def _index(self) -> Index:
        return Index(self._slots, self._keys, self._states, self._rows)

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
        return look_up(self._index, keys, self._default_row)

    def visit(self, keys: I64, tick: int) -> tuple[F32, Bool, int]:
        """The same, which counts as a use at `tick`; and how many were found."""
        rows, found = np.empty((keys.size, self.dim), np.float32), np.empty(keys.size, np.bool_)
        n_found = evicting.visit(
            self._slots, self._keys, self._states, self._rows, self._scores, plain(keys), self._default_row, rows,
            found, self._mode, tick, self._gains,
        )  # fmt: skip
        return rows, found, int(n_found)

    def apply(self, batch: RowBatch) -> Applied:
        """Write to the keys that are held; others are `full`. Raises ValueError when arrays do not fit this table."""
        check_batch(batch, self.dim)
        n = batch.keys.size
        adding = batch.op is Op.ADD
        refused = np.zeros(n, np.uint8)
        if self._capture is not None:
            self._save(self._capture, batch.keys)
        # The write loops of the plain table, told that it is full; where they stamp a change, it is dirty.
        applied, stale, _, self._live = (kernels.add if adding else kernels.assign)(
            self._slots, self._keys, self._states, self._versions, self._rows, self._stamps, 2 * self._number + 1,
            self.capacity_rows, self._live,
            plain(batch.keys), np.array(batch.versions, np.uint64, order="C"), plain_rows(batch.rows),
            batch.versioned_rows if adding else batch.op is Op.DELETE, refused,
        )  # fmt: skip
        if applied + stale == n:
            return Applied(applied, stale, NO_KEYS, NO_KEYS)
        return Applied(
            applied, stale, np.flatnonzero(refused == kernels.FULL), np.flatnonzero(refused == kernels.OVERFLOW)
        )

    def upsert(self, entries: Entries, *, force: bool) -> Upserted:
        """Write entries, evicting where there is no room; as in the protocol."""
        n = entries.n
        self._mark += 1
        if self._mark == _MOST_MARKS:
            self._marks[:] = 0
            self._mark = 1
        refused, captured = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        out = room_for(n, self.dim)
        if self._capture is not None:
            self._save(self._capture, entries.keys)
        applied, stale, n_out, self._n_free, self._used, self._live, self._hand = evicting.upsert(
            self._slots, self._keys, self._states, self._versions, self._rows, self._scores, self._stamps, self._marks,
            self._free, 2 * self._number, *self._captured, self._mark, self._n_free, self._used, self._live, self._hand,
            *_parts(entries), force, refused, captured, *_parts(out),
        )  # fmt: skip
        self._keep(out, captured[:n_out])
        return Upserted(applied, stale, np.flatnonzero(refused), out.take(slice(0, n_out)))

    def remove(self, keys: I64, above: int = -1) -> Entries:
        """Take out those of keys that are held with a score greater than `above`."""
        out, captured = room_for(keys.size, self.dim), np.zeros(keys.size, np.uint8)
        n_out, self._n_free, self._live = evicting.remove(
            self._slots, self._keys, self._states, self._versions, self._rows, self._scores, self._stamps, self._free,
            *self._captured, self._n_free, self._live, plain(keys), above, captured, *_parts(out),
        )  # fmt: skip
        self._keep(out, captured[:n_out])
        return out.take(slice(0, n_out))

    def bury(self, keys: I64) -> Entries:
        """Take out those of keys that are held as tombstones."""
        if not self.tombstones:
            return room_for(0, self.dim)
        dead = np.empty(keys.size, np.int64)
        return self.remove(dead[: evicting.tombstones(self._slots, self._keys, self._states, plain(keys), dead)])

    def expire(self, below: int) -> Entries:
        """Take out rows of a lesser score from among the next few thousand."""
        start = self._expired_to if self._expired_to < self._used else 0
        end = self._expired_to = min(start + _EXPIRE_AT_ONCE, self._used)
        keys = np.empty(end - start, np.int64)
        return self.remove(keys[: evicting.below(self._states, self._scores, self._keys, start, end, below, keys)])

    def weakest(self) -> int:
        """Least score of the window that the next eviction looks at; -1 while there is room."""
        if self._used - self._n_free < self.capacity_rows:
            return -1
        return int(evicting.weakest(self._states, self._scores, self._used, self._hand))

    def hottest(self, n: int) -> tuple[I64, U32]:
        """About the `n` live keys of greatest score, greatest first: the cut is found in a sample."""
        scores = self._scores[: self._used]
        if n < scores.size:
            sample = scores[:: max(1, scores.size // _SAMPLE)]
            cut = np.partition(sample, -1 - n * sample.size // scores.size)[-1 - n * sample.size // scores.size]
            chosen = np.flatnonzero((scores >= cut) & (self._states[: self._used] == kernels.LIVE))
        else:
            chosen = np.flatnonzero(self._states[: self._used] == kernels.LIVE)
        chosen = chosen[np.argsort(-scores[chosen].astype(np.int64), kind="stable")[:n]]
        return self._keys[chosen], scores[chosen]

    def pin(self, keys: I64) -> None:
        """Keep those of keys that are held."""
        evicting.set_score(self._slots, self._keys, self._scores, plain(keys), PINNED)

    def soil(self) -> None:
        """Take every row for changed."""
        self._stamps |= 1

    def capture_all(self) -> EvictingCapture:
        """Begin a copy of this moment, to be taken in pieces while the table changes. Ends the one before."""
        self._capture = EvictingCapture(self.entries_at, self._used, self._number)
        self._number += 1
        return self._capture

    def entries_at(self, chosen: I64, limit: int = _MOST_MARKS) -> Export:
        """Copies of the entries there that are taken and have a stamp up to `limit`."""
        chosen = chosen[(self._states[chosen] != evicting.FREE) & (self._stamps[chosen] <= limit)]
        dead = self._states[chosen] == kernels.TOMBSTONE
        return Export(self._keys[chosen], self._versions[chosen], dead, self._rows[chosen])

    @property
    def _captured(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self._capture is None else self._capture.bounds

    def _save(self, capture: EvictingCapture, keys: I64) -> None:
        """Copy aside what these keys hold: they are to change."""
        entries = np.empty(keys.size, np.int64)
        count = evicting.about_to_change(
            self._slots, self._keys, self._stamps, *capture.bounds, 2 * self._number, plain(keys), entries
        )
        if count:
            capture.saved.append(self.entries_at(entries[:count]))

    def _keep(self, gone: Entries, captured: NDArray[np.uint8]) -> None:
        if self._capture is not None and captured.any():
            at = np.flatnonzero(captured)
            self._capture.saved.append(Export(gone.keys[at], gone.versions[at], gone.tombstones[at], gone.rows[at]))

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim]; `exclude` as in the protocol."""
        return best_rows(self._index, self._used, queries, k, exclude)

    def export(self, since_version: int = 0) -> Export:
        """Return copies of every entry whose version is at least `since_version`, tombstones included."""
        return self.entries_at(np.flatnonzero(self._versions[: self._used] >= since_version))


def _cells(capacity_rows: int) -> int:
    return capacity_rows * 4 // 3 + 1


def bytes_for(capacity_rows: int, dim: int) -> int:
    """Memory of a table."""
    return _cells(capacity_rows) * 8 + capacity_rows * (8 + 1 + 8 + 4 + 4 + 4 + 8 + 4 * dim)


def rows_within(budget_bytes: int, dim: int) -> int:
    """Capacity of the largest table that takes no more memory than that; 1 at least."""
    rows = max(1, int(budget_bytes / (bytes_for(3000, dim) / 3000)) + 1)
    while rows > 1 and bytes_for(rows, dim) > budget_bytes:
        rows -= 1
    return rows


def warm() -> None:
    """Compile, or load from numba's cache, everything a table will call."""
    table = EvictingTable(dim=1, capacity_rows=2, default_row=np.zeros(1, np.float32), policy=Policy())
    some = Entries(
        np.arange(3), np.ones(3, np.uint64), np.zeros(3, np.bool_), np.ones((3, 1), np.float32),
        np.ones(3, np.uint32), np.ones(3, np.bool_),
    )  # fmt: skip
    table.capture_all()
    for force in (True, False):
        table.upsert(some, force=force)
    for op in (Op.ASSIGN, Op.ADD):
        table.apply(RowBatch(op, some.keys, some.versions, some.rows))
    table.visit(some.keys, 1)
    table.lookup(some.keys)
    table.topk(some.rows[:1], 1, (some.keys[:0],))
    table.weakest()
    table.pin(some.keys[:0])
    table.expire(1)
    table.apply(RowBatch(Op.DELETE, some.keys, some.versions + np.uint64(1), some.rows[:0]))
    table.bury(some.keys)


def _parts(entries: Entries) -> tuple[Any, ...]:
    return (
        as_is(entries.keys), as_is(entries.versions), as_is(entries.tombstones), as_is(entries.rows),
        as_is(entries.scores), as_is(entries.dirty),
    )  # fmt: skip
