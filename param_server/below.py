"""What lies under the rows that a shard holds: rows on their way down, reads under way, the cold tier.

Decides what a write to a key that is not held does, what is fetched, and what a read that is over may change.
Invariant: a read never replaces what is newer, nor what was written to after the read was sent. For one owner thread.

Replicas of a shard share the cold tier, so it may change under each of them. It only ever gets newer, and a state that
comes from there is one of the same log; that this replica has yet to reach it is what `placeinlog.py` is for. `floors`
need not know what others wrote, only every version that a row had here before it left: written down or read from below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from infra.clock import Clock
from param_server.cold import ABSENT, LIVE, N_FLOORS, ColdRows, floor_of
from param_server.contract import F32, I64, U64, Op
from param_server.ferry import Event, Fetched, Floors, Lane, Stored
from param_server.holding import Holding, TierRules
from param_server.missing import Missing
from param_server.residents import taken
from param_server.rowstate import RowState, Verdict, Write, written
from param_server.table import Applied, Bool, RowBatch
from param_server.table.tier import Entries

_AT_ONCE = 1024
_FAILED_FOR_S = 1.0
# Beside the verdicts of `rowstate.py`: no room.
_FULL = 3

Verdicts = NDArray[np.int8]


class Below:
    """For one table. Without a `lane` there is no cold tier, and keys that find no room are refused."""

    def __init__(self, holding: Holding, rules: TierRules, lane: Lane | None, clock: Clock) -> None:
        self._holding = holding
        self._leaving = holding.leaving
        self._place_in_log = holding.place_in_log
        self._rules = rules
        self._lane = lane
        self._clock = clock
        self._floors = np.zeros(N_FLOORS, np.uint64)
        self._met = False
        self._reading = False
        self._writing = False
        self.missing = Missing()
        self.counts = dict.fromkeys(
            ("leaving", "missing", "filled", "absent", "failed", "late", "stored", "waited", "overflow"), 0
        )

    @property
    def hold(self) -> bool:
        """Whether more rows are on their way down, or more writes wait, than may be."""
        if self._lane is None:
            return False
        return len(self._leaving) >= self._rules.most_leaving or self.missing.n_waiting >= self._rules.most_waiting

    def answer(self, keys: I64, rows: F32, found: Bool) -> None:
        """Answer from what is on its way down; have the rest fetched if it is asked for often enough."""
        lost = np.flatnonzero(~found)
        wanted = []
        for i, key in zip(lost.tolist(), keys[lost].tolist(), strict=True):
            state = self._leaving.get(key)
            if state is None:
                wanted.append(key)
            elif state.row is not None:
                rows[i], found[i] = state.row, True
                self.counts["leaving"] += 1
        self.counts["missing"] += keys.size - int(np.count_nonzero(found))
        if not wanted or self._lane is None:
            return
        now_s = self._clock.monotonic_s()
        counts = self._holding.sketch.add(np.array(wanted, np.int64)).tolist()
        for key, count in zip(wanted, counts, strict=True):
            if count >= self._rules.admission_threshold and self.missing.unknown(key, now_s):
                self.missing.ask(key)

    def ask(self, keys: I64) -> int:
        """Have those of keys read that are neither here nor known to be nowhere; how many are not here yet."""
        now_s = self._clock.monotonic_s()
        away = [key for key in keys.tolist() if key not in self._leaving]
        return sum(not self.missing.unknown(key, now_s) or self.missing.ask(key) for key in away)

    def apply(self, batch: RowBatch, done: Applied) -> Applied:
        """Write the rows of `done.full`, whose keys are not held."""
        at = done.full
        batch = taken(batch, at)
        certain = self._certain(batch)
        if self._all_new(batch, certain):
            self._holding.arrive(batch.keys, batch.versions, np.zeros(at.size, np.bool_), batch.rows)
            return Applied(done.applied + at.size, done.stale, at[:0], done.overflow)
        verdicts, states = self._judge(batch, certain.tolist())
        self._holding.arrive_each(states)
        stale = int(np.count_nonzero(verdicts == Verdict.STALE))
        full, overflow = at[verdicts == _FULL], at[verdicts == Verdict.OVERFLOW]
        applied = at.size - stale - full.size - overflow.size
        return Applied(done.applied + applied, done.stale + stale, full, np.union1d(done.overflow, overflow))

    def turn(self) -> None:
        """Take in what the cold tier answered, and send what is to go."""
        if self._lane is None:
            return
        for event in self._lane.take():
            self._take(event)
        self._place_in_log.let_pass()
        if not self._writing and self._leaving.queued:
            rows = self._leaving.batch(_AT_ONCE)
            if rows:
                self._writing = True
                self._lane.write(rows)
        if not self._reading and (read := self.missing.next_read(_AT_ONCE)) is not None:
            self._reading = True
            self._lane.read(*read)

    def newest(self, entries: Entries, cold: ColdRows) -> Entries:
        """The entries, or what the cold tier holds of their keys where that is newer; deleted ones stay there."""
        at = (cold.found != ABSENT) & (
            (cold.versions > entries.versions) | ((cold.versions == entries.versions) & (cold.orders > 0))
        )
        if not at.any():
            return entries
        self._raise_floors(cold.keys, cold.versions)
        live = at & (cold.found == LIVE)
        now = self._orders(cold.keys[live])
        for key, order, here in zip(cold.keys[live].tolist(), cold.orders[live].tolist(), now, strict=True):
            self._place_in_log.arrived(key, order, here)
        return Entries(
            entries.keys, np.where(live, cold.versions, entries.versions), entries.tombstones & ~live,
            np.where(live[:, None], cold.rows, entries.rows), entries.scores, entries.dirty & ~live,
        ).take(~at | live)  # fmt: skip

    def _all_new(self, batch: RowBatch, certain: Bool) -> bool:
        """Whether nothing is known of any of the keys that could matter, so that all can be decided at once."""
        if batch.op is not Op.ASSIGN or not certain.all() or np.unique(batch.keys).size < batch.keys.size:
            return False
        if self._lane is None:
            return batch.keys.size <= self._holding.residents.room
        return not any(key in self._leaving or self.missing.waits(key) for key in batch.keys.tolist())

    def _judge(self, batch: RowBatch, certain: list[bool]) -> tuple[Verdicts, dict[int, RowState]]:
        """A verdict for each row, and the new states of keys of which nothing was known."""
        now_s = self._clock.monotonic_s()
        adding = batch.op is Op.ADD
        keys, versions = batch.keys.tolist(), batch.versions.tolist()
        orders, places = self._orders(batch.keys), self._place_in_log.of_writes(batch)
        room = self._holding.residents.room if self._lane is None else -1
        verdicts = np.zeros(len(keys), np.int8)
        fresh: dict[int, RowState] = {}
        # Assigns backwards, so that `greater` alone makes the last of equal versions win; as the tables do.
        for i in range(len(keys)) if adding else range(len(keys) - 1, -1, -1):
            key = keys[i]
            row = None if batch.op is Op.DELETE else batch.rows[i]
            write = Write(batch.op, versions[i], row, batch.versioned_rows, places[i])
            if key in self._leaving:
                verdicts[i] = self._leaving.write(key, write, orders[i])
            elif self.missing.waits(key) or not (certain[i] or key in fresh or self.missing.surely_absent(key, now_s)):
                self.missing.wait(key, write)
                self.counts["waited"] += 1
            elif key not in fresh and len(fresh) == room:
                verdicts[i] = _FULL
            else:
                state, verdict = written(fresh.get(key), write)
                verdicts[i] = verdict
                if state is not None:
                    fresh[key] = state
        return verdicts, fresh

    def _orders(self, keys: I64) -> list[int]:
        orders: list[int] = self._place_in_log.orders(keys).tolist()
        return orders

    def _certain(self, batch: RowBatch) -> Bool:
        """Which rows need not be read: nothing below can be as new as they are."""
        if self._lane is None:
            return np.ones(batch.keys.size, np.bool_)
        if batch.op is Op.ADD or not self._met:
            return np.zeros(batch.keys.size, np.bool_)
        return np.asarray(batch.versions > self._floors[floor_of(batch.keys)])

    def _take(self, event: Event) -> None:
        if isinstance(event, Floors):
            if event.lost:
                self._holding.residents.soil()
                self._place_in_log.strand()
            self._floors = event.versions.copy() if event.lost else np.maximum(self._floors, event.versions)
            self._met = True
        elif isinstance(event, Stored):
            self._stored(event)
        else:
            self._reading = False
            self._fetched(event)

    def _stored(self, event: Stored) -> None:
        self._writing = False
        self.counts["stored"] += len(event.rows)
        keys = np.array([row.key for row in event.rows], np.int64)
        self._raise_floors(keys, np.array([row.state.version for row in event.rows], np.uint64))
        self._leaving.acknowledge(event.rows)

    def _raise_floors(self, keys: I64, versions: U64) -> None:
        np.maximum.at(self._floors, floor_of(keys), versions)

    def _fetched(self, event: Fetched) -> None:
        arrived = np.array([self.missing.arrived(event.number, key) for key in event.keys.tolist()], np.bool_)
        self.counts["late"] += int(np.count_nonzero(~arrived))
        keys = event.keys[arrived]
        if event.rows is None:
            self._failed(keys)
            return
        rows = event.rows
        self._raise_floors(rows.keys, rows.versions)
        until_s = self._clock.monotonic_s() + self._rules.negative_ttl_s
        fills: list[int] = []
        states: dict[int, RowState] = {}
        at = np.flatnonzero(arrived).tolist()
        for i, key, now in zip(at, keys.tolist(), self._orders(keys), strict=True):
            found, order = int(rows.found[i]), int(rows.orders[i])
            writes = self.missing.take_waiting(key)
            if found == LIVE or writes is not None:
                self._place_in_log.arrived(key, order, now)
            if writes is not None:
                stored = RowState(int(rows.versions[i]), rows.rows[i] if found == LIVE else None)
                state = self._caught_up(None if found == ABSENT else stored, order, writes)
                if state is not None:
                    states[key] = state
            elif found == LIVE:
                fills.append(i)
            else:
                self.counts["absent"] += 1
                self.missing.remember_absent(key, until_s, sure=found == ABSENT)
        self._fill(rows, np.array(fills, np.int64))
        self._holding.arrive_each(states)

    def _caught_up(self, base: RowState | None, order: int, writes: list[Write]) -> RowState | None:
        state = base
        for write in writes:
            if base is not None and write.order < order:
                continue
            state, verdict = written(state, write)
            self.counts["overflow"] += verdict is Verdict.OVERFLOW
        return state

    def _fill(self, rows: ColdRows, at: I64) -> None:
        if at.size:
            alive = np.zeros(at.size, np.bool_)
            self.counts["filled"] += at.size
            entries = self._holding.entries(rows.keys[at], rows.versions[at], alive, rows.rows[at], dirty=False)
            self._holding.place(entries, force=True)

    def _failed(self, keys: I64) -> None:
        self.counts["failed"] += keys.size
        until_s = self._clock.monotonic_s() + _FAILED_FOR_S
        for key in keys.tolist():
            if self.missing.waits(key):
                self.missing.ask_again(key)
            else:
                self.missing.remember_absent(key, until_s, sure=False)
