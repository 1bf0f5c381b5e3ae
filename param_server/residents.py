"""The rows of one table that a shard holds: hot, and warm below it. A key is in at most one of the two.

Does no I/O and knows no cold tier: what finds no room is returned to the caller, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from param_server.contract import F32, I64
from param_server.eviction import U32
from param_server.table import Applied, Bool, Export, RowBatch, TopK
from param_server.table.tier import NOTHING, Entries, TierTable, joined

_MOST_PROMISING = 4096


class Residents:
    """`hot` alone, or over `warm`. A row found in warm is remembered until `promote` moves it up, if it earns it."""

    def __init__(self, hot: TierTable, warm: TierTable | None) -> None:
        self.hot = hot
        self.warm = warm
        self._promising: list[I64] = []
        self._n_promising = 0
        self.hits_hot = 0
        self.hits_warm = 0
        self.promoted = 0
        self.demoted = 0

    @property
    def tables(self) -> tuple[TierTable, ...]:
        """Hot, then warm."""
        return (self.hot,) if self.warm is None else (self.hot, self.warm)

    @property
    def room(self) -> int:
        """New entries that are sure to find room."""
        return sum(table.room for table in self.tables)

    def visit(self, keys: I64, tick: int) -> tuple[F32, Bool, int]:
        """Rows f32[n, dim], found bool[n], and how many were; every row found counts as used."""
        rows, found, n_found = self.hot.visit(keys, tick)
        self.hits_hot += n_found
        if self.warm is None or n_found == keys.size:
            return rows, found, n_found
        missing = np.flatnonzero(~found)
        below, there, n_there = self.warm.visit(keys[missing], tick)
        if n_there:
            at = missing[there]
            rows[at], found[at] = below[there], True
            self.hits_warm += at.size
            if self._n_promising < _MOST_PROMISING:
                self._promising.append(keys[at])
                self._n_promising += at.size
        return rows, found, n_found + n_there

    def apply(self, batch: RowBatch) -> Applied:
        """Write to the keys that are here; others are `full`. Raises ValueError."""
        done = self.hot.apply(batch)
        if self.warm is None or not done.full.size:
            return done
        rest = self.warm.apply(taken(batch, done.full))
        overflow = np.union1d(done.overflow, done.full[rest.overflow])
        return Applied(done.applied + rest.applied, done.stale + rest.stale, done.full[rest.full], overflow)

    def place(self, entries: Entries, *, force: bool) -> Entries:
        """Put entries of distinct keys that are not here; what must go down."""
        up = self.hot.upsert(entries, force=force)
        down = joined([entries.take(up.full), up.evicted])
        self.demoted += up.evicted.n
        if self.warm is None or not down.n:
            return down
        lower = self.warm.upsert(down, force=force)
        return joined([down.take(lower.full), lower.evicted])

    def bury(self, keys: I64) -> Entries:
        """Take out those of keys that are deleted."""
        return joined([table.bury(keys) for table in self.tables])

    def promote(self) -> Entries:
        """Move up the rows that were found in warm and are used more than what they displace; what must go down."""
        if self.warm is None or not self._promising:
            return self._none()
        keys = np.unique(np.concatenate(self._promising))
        self._promising.clear()
        self._n_promising = 0
        return self._lift(keys, self.hot.weakest())

    def lift(self, keys: I64) -> Entries:
        """Move these up if they are in warm and there is room, or a row of lesser score; what must go down."""
        return self._none() if self.warm is None else self._lift(np.unique(keys), -1)

    def expire(self, below: int) -> Entries:
        """Take down rows that have lived too long; what must go down further."""
        gone = self.hot.expire(below)
        if self.warm is None:
            return gone
        older = self.warm.expire(below)
        lower = self.warm.upsert(gone, force=True) if gone.n else None
        return older if lower is None else joined([older, gone.take(lower.full), lower.evicted])

    def hottest(self, n: int) -> tuple[I64, U32]:
        """About the `n` hot keys used most, first to last, with their scores."""
        return self.hot.hottest(n)

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """The best of both; as in the protocol."""
        best = self.hot.topk(queries, k, exclude)
        if self.warm is None or not self.warm.size:
            return best
        return [_merged(a, b, k) for a, b in zip(best, self.warm.topk(queries, k, exclude), strict=True)]

    def export(self, since_version: int = 0) -> Export:
        """Every entry of both."""
        parts = [table.export(since_version) for table in self.tables]
        return parts[0] if len(parts) == 1 else merged_exports(parts)

    def holds(self, keys: I64) -> Bool:
        """Which of keys have a live row here; not a use."""
        held = self.hot.lookup(keys)[1]
        return held if self.warm is None else held | self.warm.lookup(keys)[1]

    def pin(self, keys: I64) -> None:
        """Keep those that are hot."""
        self.hot.pin(keys)

    def soil(self) -> None:
        """Take every row for changed."""
        for table in self.tables:
            table.soil()

    def _lift(self, keys: I64, above: int) -> Entries:
        if self.warm is None:
            return self._none()
        moving = self.warm.remove(keys, above)
        if not moving.n:
            return moving
        up = self.hot.upsert(moving, force=False)
        self.promoted += moving.n - up.full.size
        self.demoted += up.evicted.n
        # As many places are free in warm as were taken from it.
        back = joined([moving.take(up.full), up.evicted])
        lower = self.warm.upsert(back, force=True)
        return joined([back.take(lower.full), lower.evicted])

    def _none(self) -> Entries:
        return self.hot.remove(NOTHING)


def taken(batch: RowBatch, chosen: I64) -> RowBatch:
    """The chosen rows of a batch."""
    rows = batch.rows[chosen] if batch.rows.shape[0] else batch.rows
    return RowBatch(batch.op, batch.keys[chosen], batch.versions[chosen], rows, batch.versioned_rows, batch.order)


def merged_exports(parts: Sequence[Export]) -> Export:
    """One after the other."""
    return Export(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.versions for part in parts]),
        np.concatenate([part.tombstones for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )


def _merged(a: TopK, b: TopK, k: int) -> TopK:
    keys = np.concatenate([a.keys, b.keys])
    scores = np.concatenate([a.scores, b.scores])
    best = np.lexsort((keys, -scores))[: max(k, 0)]
    return TopK(keys[best], scores[best], np.concatenate([a.rows, b.rows])[best])
