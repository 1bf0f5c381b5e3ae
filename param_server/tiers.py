"""One table over tiers: hot and warm rows here, all others in the cold tier; lookups never wait for it.

- A lookup answers at once from what is held; a missing row is fetched in the background, if it was asked for often
  enough, and is there for a later lookup.
- A write to a key that is held applies at once. To another key: if its version is greater than all that ever went down
  in its part of the key space, the stored row cannot matter and the new one goes where `new_keys` says. Else (and for
  every add) it waits until the row was read; then it applies as if the row had been here.
- What finds no room goes down with its version, tombstones too, and is kept here until the cold tier acknowledged it.
- The cold tier may be ahead of the log's position: after a restart, and where replicas share it and another one is
  further. `order` says up to where in the log a row is complete; writes before that are in it already and are skipped,
  so an add counts once. A capture leaves such rows out: they are below, as they are here.

Without a cold tier nothing is dropped: keys that find no room are refused. Invariant: every key's newest state is in
exactly one place: hot, warm, on its way down, or in the cold tier with the writes that wait for it here.
For one owner thread; `turn` must be called between batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from infra.clock import Clock
from param_server.below import Below
from param_server.cold import ColdRows
from param_server.contract import F32, I64, Op
from param_server.ferry import Lane
from param_server.holding import Holding, TierRules
from param_server.leaving import Departure
from param_server.placeinlog import Orders
from param_server.residents import Residents, merged_exports, taken
from param_server.sketch import U8
from param_server.table import Applied, Bool, Capture, Export, RowBatch, TopK
from param_server.table.tier import TierTable

_RESTORE_AT_ONCE = 8192


class TierCapture:
    """The entries of all tiers of one moment, but for those of the keys `ahead`; `table.Capture`."""

    number = 0

    def __init__(self, parts: list[Capture], leaving: Export, ahead: I64) -> None:
        self._parts = parts
        self._leaving: Export | None = leaving
        self._ahead = ahead

    def take(self, most_rows: int) -> Export | None:
        """The next piece of about `most_rows` entries, perhaps empty; None when everything was given out."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            return self._behind(leaving)
        while self._parts:
            if (piece := self._parts[0].take(most_rows)) is not None:
                return self._behind(piece)
            self._parts.pop(0)
        return None

    def _behind(self, piece: Export) -> Export:
        if not self._ahead.size:
            return piece
        at = np.flatnonzero(~np.isin(piece.keys, self._ahead))
        return Export(piece.keys[at], piece.versions[at], piece.tombstones[at], piece.rows[at])


class TieredTable:
    """`EmbeddingTable` over `residents` and, through `lane`, the cold tier."""

    def __init__(self, residents: Residents, rules: TierRules, lane: Lane | None, clock: Clock) -> None:
        self._residents = residents
        self._policy = rules.policy
        self._has_cold = lane is not None
        self._holding = Holding(residents, rules, clock, has_cold=lane is not None)
        self._below = Below(self._holding, rules, lane, clock)

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._residents.hot.dim

    @property
    def size(self) -> int:
        """Live rows held here."""
        leaving = sum(departure.state.row is not None for departure in self._holding.leaving)
        return sum(table.size for table in self._residents.tables) + leaving

    @property
    def tombstones(self) -> int:
        """Deleted keys whose version is remembered here."""
        leaving = sum(departure.state.row is None for departure in self._holding.leaving)
        return sum(table.tombstones for table in self._residents.tables) + leaving

    @property
    def capacity_rows(self) -> int:
        """Most rows and tombstones of hot and warm; with a cold tier there may be more keys than that."""
        return sum(table.capacity_rows for table in self._residents.tables)

    @property
    def bytes(self) -> int:
        """Memory set aside, index and sketch included."""
        return sum(table.bytes for table in self._residents.tables) + self._holding.sketch.bytes

    @property
    def hot(self) -> TierTable:
        """The hot tier."""
        return self._residents.hot

    @property
    def hold(self) -> bool:
        """Whether the stream should wait for the cold tier."""
        return self._below.hold

    @property
    def waiting(self) -> bool:
        """Whether writes wait for the cold tier."""
        return self._below.missing.n_waiting > 0

    @property
    def unsettled(self) -> bool:
        """Whether a snapshot taken now would be wrong: it lacks writes that wait, and rows that are ahead."""
        return self.waiting or self._holding.place_in_log.stranded

    @property
    def leaving(self) -> int:
        """Rows that the cold tier has yet to acknowledge."""
        return len(self._holding.leaving)

    @property
    def asked(self) -> int:
        """Keys that are being read, or are to be."""
        return self._below.missing.n_asked

    def follow(self, orders: Orders) -> None:
        """Take order from the log: orders u64[n] of keys i64[n] are the places up to which it is applied here."""
        self._holding.place_in_log.follow(orders)

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n]; what is not held is missing, for now."""
        rows, found, n_found = self._residents.visit(keys, self._holding.tick)
        if n_found < keys.size:
            self._below.answer(keys, rows, found)
        return rows, found

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch. A write that waits for its row counts as applied. Raises ValueError."""
        included = self._holding.place_in_log.begin(batch)
        if included is not None and included.any():
            kept = np.flatnonzero(~included)
            done = self._apply(taken(batch, kept))
            skipped = batch.keys.size - kept.size
            return Applied(done.applied, done.stale + skipped, kept[done.full], kept[done.overflow])
        return self._apply(batch)

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k best live rows of hot and warm for each query f32[q, dim]; cold rows are not recalled."""
        return self._residents.topk(queries, k, exclude)

    def export(self, since_version: int = 0) -> Export:
        """Return every entry held here, those on their way down included."""
        gone = [d for d in self._holding.leaving if d.state.version >= since_version]
        held = self._residents.export(since_version)
        return merged_exports([held, self._as_export(gone)]) if gone else held

    def capture_all(self) -> TierCapture:
        """Begin a copy of this moment, to be taken in pieces while the table changes. Ends the one before."""
        return TierCapture(
            [table.capture_all() for table in self._residents.tables],
            self._as_export(list(self._holding.leaving)),
            self._holding.place_in_log.ahead(),
        )

    def turn(self) -> None:
        """Take in what the cold tier answered, move rows between the tiers, send what is to go."""
        self._holding.pass_time()
        self._holding.descend(self._residents.promote())
        self._below.turn()

    def restore(self, state: Export, wait: Callable[[], None], cold: Callable[[I64], ColdRows] | None = None) -> bool:
        """Put entries into the empty table, the most used ones hot; False when they do not fit.

        `wait` is called while the cold tier has to take more. With `cold`, which reads it, a row that is newer there is
        taken instead: needed where the entries are older than the position from which the log is read on.
        """
        if not self._has_cold and state.keys.size > self._residents.room:
            return False
        for start in range(0, state.keys.size, _RESTORE_AT_ONCE):
            part = slice(start, start + _RESTORE_AT_ONCE)
            entries = self._holding.entries(
                state.keys[part], state.versions[part], state.tombstones[part], state.rows[part]
            )
            if cold is not None:
                entries = self._below.newest(entries, cold(entries.keys))
            # A table keeps what it takes in of one batch: the last rows come first, so they are the most used ones.
            self._holding.place(entries.take(np.argsort(entries.scores, kind="stable")), force=False)
            while self.hold:
                wait()
                self.turn()
        return True

    def fetch(self, keys: I64) -> int:
        """Bring these up, however rarely they were asked for; how many are not held yet."""
        self._holding.descend(self._residents.lift(keys))
        away = keys[~self._residents.holds(keys)]
        return self._below.ask(away) if self._has_cold else 0

    def pin(self, keys: I64) -> None:
        """Never evict those that are hot now."""
        self._residents.pin(keys)

    def seed(self, keys: I64, counts: U8) -> None:
        """Take these counts for known: rows that arrive go hot by them."""
        self._holding.sketch.raise_to(keys, counts)

    def hottest(self, n: int) -> tuple[I64, F32]:
        """About the `n` keys used most, first to last, and about how often."""
        keys, scores = self._residents.hottest(n)
        return keys, self._policy.counts(scores, self._holding.tick)

    def health(self) -> dict[str, Any]:
        """Rows per tier, and counts since the start of this process."""
        residents, below = self._residents, self._below
        counts = below.counts
        hits = {"hot": residents.hits_hot, "warm": residents.hits_warm, "leaving": counts["leaving"]}
        asked = sum(hits.values()) + counts["missing"]
        return {
            "hot_rows": residents.hot.size,
            "warm_rows": residents.warm.size if residents.warm is not None else 0,
            "leaving_rows": self.leaving,
            "waiting_writes": below.missing.n_waiting,
            "asked_rows": below.missing.n_asked,
            "known_absent": below.missing.n_absent,
            "ahead_rows": len(self._holding.place_in_log),
            "hits": hits,
            "misses": counts["missing"],
            "hit_rate": round(sum(hits.values()) / asked, 4) if asked else None,
            "promoted": residents.promoted,
            "demoted": residents.demoted,
            "cold": {
                "dropped": self._holding.dropped,
                **{name: n for name, n in counts.items() if name not in ("leaving", "missing")},
            },
        }

    def _as_export(self, gone: list[Departure]) -> Export:
        rows = np.zeros((len(gone), self.dim), np.float32)
        for i, departure in enumerate(gone):
            if departure.state.row is not None:
                rows[i] = departure.state.row
        keys = np.array([d.key for d in gone], np.int64)
        versions = np.array([d.state.version for d in gone], np.uint64)
        return Export(keys, versions, np.array([d.state.row is None for d in gone], np.bool_), rows)

    def _apply(self, batch: RowBatch) -> Applied:
        done = self._residents.apply(batch)
        if batch.op is Op.DELETE:
            self._holding.bury(batch.keys)
        if done.full.size:
            done = self._below.apply(batch, done)
        if self._below.missing.anything:
            self._below.missing.forget(batch.keys.tolist())
        return done
