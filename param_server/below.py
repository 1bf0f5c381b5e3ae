"""What lies under the rows that a shard holds: rows on their way down, reads under way, the cold tier.

Decides where a write to a key that is not held goes, what is fetched, and what a read that is over may change.
Invariant: a read never replaces what is newer, nor what was written to after the read was sent. For one owner thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from infra.clock import Clock
from param_server.cold import ABSENT, LIVE, ColdRows, floor_of
from param_server.contract import F32, I64, U64, Op
from param_server.eviction import Policy
from param_server.ferry import Event, Fetched, Floors, Lane, Stored
from param_server.leaving import Leaving
from param_server.missing import Missing
from param_server.placeinlog import PlaceInLog
from param_server.residents import Residents, taken
from param_server.rowstate import RowState, Verdict, Write, written
from param_server.sketch import CountingSketch
from param_server.table import Applied, Bool, RowBatch
from param_server.table.tier import Entries

_AT_ONCE = 1024
_FAILED_FOR_S = 1.0
_LEAST_COUNTED = 1024
# Beside the verdicts of `rowstate.py`: no room.
_FULL = 3

NewKeys = Literal["insert", "cold_only", "if_admitted"]


@dataclass(frozen=True, slots=True)
class TierRules:
    """How one table uses its tiers. `admission_threshold`: how often a row is asked for before it is fetched, or (with
    `if_admitted`) before a new key is held; `most_leaving` rows and `most_waiting` writes are kept before the stream
    must wait."""

    policy: Policy = field(default_factory=Policy)
    new_keys: NewKeys = "insert"
    admission_threshold: int = 1
    negative_ttl_s: float = 30.0
    most_leaving: int = 65536
    most_waiting: int = 65536


class Below:
    """For one table. Without a `lane` there is no cold tier, and keys that find no room are refused."""

    def __init__(self, residents: Residents, rules: TierRules, lane: Lane | None, clock: Clock) -> None:
        self._residents = residents
        self._rules = rules
        self._lane = lane
        self._clock = clock
        self._born_s = clock.monotonic_s()
        self._floors: U64 | None = None
        self._reading = False
        self._writing = False
        self.sketch = CountingSketch(max(_LEAST_COUNTED, sum(table.capacity_rows for table in residents.tables)))
        self.place_in_log = PlaceInLog()
        self.leaving = Leaving()
        self.missing = Missing()
        self.counts = dict.fromkeys(
            ("leaving", "missing", "filled", "absent", "failed", "late", "stored", "dropped", "waited", "overflow"), 0
        )

    @property
    def age_s(self) -> float:
        """Seconds since the table began."""
        return self._clock.monotonic_s() - self._born_s

    @property
    def tick(self) -> int:
        """Score of one use now."""
        return self._rules.policy.tick(self.age_s)

    @property
    def hold(self) -> bool:
        """Whether more rows are on their way down, or more writes wait, than may be."""
        if self._lane is None:
            return False
        return len(self.leaving) >= self._rules.most_leaving or self.missing.n_waiting >= self._rules.most_waiting

    def entries(self, keys: I64, versions: U64, tombstones: Bool, rows: F32, *, dirty: bool | Bool = True) -> Entries:
        """Entries that arrive now, scored by how often their keys were asked for."""
        scores = self._rules.policy.fresh(self.sketch.estimate(keys), self.tick)
        return Entries(keys, versions, tombstones, rows, scores, np.full(keys.size, dirty, np.bool_))

    def place(self, entries: Entries, *, force: bool) -> None:
        """Hold entries of keys that are not held; what they displace, and above a cold tier tombstones, goes down."""
        if self._lane is not None and entries.tombstones.any():
            self.descend(entries.take(entries.tombstones))
            entries = entries.take(~entries.tombstones)
        self.descend(self._residents.place(entries, force=force))

    def bury(self, keys: I64) -> None:
        """Have those of keys that were deleted go down: above a cold tier only live rows are held."""
        if self._lane is not None:
            self.descend(self._residents.bury(keys))

    def descend(self, down: Entries) -> None:
        """Send down what is no longer held; what came from below and never changed is there already."""
        if not down.n:
            return
        counts = np.minimum(self._rules.policy.counts(down.scores, self.tick), 255)
        self.sketch.raise_to(down.keys, counts.astype(np.uint8))
        if self._lane is not None:
            going = np.flatnonzero(down.dirty | down.tombstones)
            self.counts["dropped"] += down.n - going.size
            down = down.take(going)
        orders = self._orders(down.keys)
        dead = down.tombstones.tolist()
        for i, (key, version) in enumerate(zip(down.keys.tolist(), down.versions.tolist(), strict=True)):
            state = RowState(version, None if dead[i] else down.rows[i].copy())
            self.leaving.put(key, state, orders[i])

    def answer(self, keys: I64, rows: F32, found: Bool) -> None:
        """Answer from what is on its way down; have the rest fetched if it is asked for often enough."""
        now_s = self._clock.monotonic_s()
        lost = np.flatnonzero(~found)
        wanted = []
        for i, key in zip(lost.tolist(), keys[lost].tolist(), strict=True):
            state = self.leaving.get(key)
            if state is None:
                self.counts["missing"] += 1
                wanted.append(key)
            elif state.row is None:
                self.counts["missing"] += 1
            else:
                rows[i], found[i] = state.row, True
                self.counts["leaving"] += 1
        if not wanted or self._lane is None:
            return
        counts = self.sketch.add(np.array(wanted, np.int64)).tolist()
        for key, count in zip(wanted, counts, strict=True):
            if count >= self._rules.admission_threshold and self.missing.unknown(key, now_s):
                self.missing.ask(key)

    def ask(self, keys: I64) -> int:
        """Have those of keys read that are neither here nor known to be nowhere; how many are not here yet."""
        now_s = self._clock.monotonic_s()
        away = [key for key in keys.tolist() if key not in self.leaving]
        return sum(not self.missing.unknown(key, now_s) or self.missing.ask(key) for key in away)

    def apply(self, batch: RowBatch, done: Applied) -> Applied:
        """Write the rows of `done.full`, whose keys are not held."""
        at = done.full
        verdicts, states = self._judge(taken(batch, at))
        self._settle(states)
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
        self.place_in_log.let_pass()
        if not self._writing and self.leaving.queued:
            rows = self.leaving.batch(_AT_ONCE)
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
        live = at & (cold.found == LIVE)
        for key, order, now in zip(
            cold.keys[live].tolist(), cold.orders[live].tolist(), self._orders(cold.keys[live]), strict=True
        ):
            self.place_in_log.arrived(key, order, now)
        return Entries(
            entries.keys, np.where(live, cold.versions, entries.versions), entries.tombstones & ~live,
            np.where(live[:, None], cold.rows, entries.rows), entries.scores, entries.dirty & ~live,
        ).take(~at | live)  # fmt: skip

    def _judge(self, batch: RowBatch) -> tuple[np.ndarray[tuple[int], np.dtype[np.int8]], dict[int, RowState]]:
        """A verdict for each row, and the new states of keys of which nothing was known."""
        now_s = self._clock.monotonic_s()
        adding = batch.op is Op.ADD
        keys, versions = batch.keys.tolist(), batch.versions.tolist()
        orders, places = self._orders(batch.keys), self.place_in_log.of_writes(batch)
        certain = self._certain(batch)
        room = self._residents.room if self._lane is None else -1
        verdicts = np.zeros(len(keys), np.int8)
        fresh: dict[int, RowState] = {}
        # Assigns backwards, so that `greater` alone makes the last of equal versions win; as the tables do.
        for i in range(len(keys)) if adding else range(len(keys) - 1, -1, -1):
            key = keys[i]
            row = None if batch.op is Op.DELETE else batch.rows[i].copy()
            write = Write(batch.op, versions[i], row, batch.versioned_rows, places[i])
            if key in self.leaving:
                verdicts[i] = self.leaving.write(key, write, orders[i])
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
        orders: list[int] = self.place_in_log.orders(keys).tolist()
        return orders

    def _certain(self, batch: RowBatch) -> list[bool]:
        """Which rows need not be read: nothing below can be as new as they are."""
        if self._lane is None:
            return [True] * batch.keys.size
        if batch.op is Op.ADD or self._floors is None:
            return [False] * batch.keys.size
        newer: list[bool] = (batch.versions > self._floors[floor_of(batch.keys)]).tolist()
        return newer

    def _settle(self, states: Mapping[int, RowState]) -> None:
        """Put new states of keys that are not held where they belong."""
        if not states:
            return
        keys = np.fromiter(states, np.int64, len(states))
        orders = self._orders(keys)
        dead = np.array([state.row is None for state in states.values()])
        held = self._to_hold(keys, dead)
        for i, (key, state) in enumerate(states.items()):
            if not held[i]:
                self.leaving.put(key, state, orders[i])
        at = np.flatnonzero(held)
        if at.size:
            chosen = [state for state, hold in zip(states.values(), held.tolist(), strict=True) if hold]
            zeros = np.zeros(self._residents.hot.dim, np.float32)
            rows = np.stack([zeros if state.row is None else state.row for state in chosen])
            versions = np.array([state.version for state in chosen], np.uint64)
            self.place(self.entries(keys[at], versions, dead[at], rows), force=True)

    def _to_hold(self, keys: I64, dead: Bool) -> Bool:
        if self._lane is None:
            return np.ones(keys.size, np.bool_)
        if self._rules.new_keys == "insert":
            return ~dead
        if self._rules.new_keys == "cold_only":
            return np.zeros(keys.size, np.bool_)
        return ~dead & (self.sketch.estimate(keys) >= self._rules.admission_threshold)

    def _take(self, event: Event) -> None:
        if isinstance(event, Floors):
            if event.lost:
                self._residents.soil()
            known = self._floors
            self._floors = event.versions if event.lost or known is None else np.maximum(known, event.versions)
        elif isinstance(event, Stored):
            self._stored(event)
        else:
            self._reading = False
            self._fetched(event)

    def _stored(self, event: Stored) -> None:
        self._writing = False
        self.counts["stored"] += len(event.rows)
        if self._floors is not None:
            keys = np.array([row.key for row in event.rows], np.int64)
            versions = np.array([row.state.version for row in event.rows], np.uint64)
            np.maximum.at(self._floors, floor_of(keys), versions)
        self.leaving.acknowledge(event.rows)

    def _fetched(self, event: Fetched) -> None:
        arrived = np.array([self.missing.arrived(event.number, key) for key in event.keys.tolist()], np.bool_)
        self.counts["late"] += int(np.count_nonzero(~arrived))
        keys = event.keys[arrived]
        if event.rows is None:
            self._failed(keys)
            return
        rows = event.rows
        at = np.flatnonzero(arrived)
        until_s = self._clock.monotonic_s() + self._rules.negative_ttl_s
        fills, states = [], {}
        for i, key, now in zip(at.tolist(), keys.tolist(), self._orders(keys), strict=True):
            found, order = int(rows.found[i]), int(rows.orders[i])
            writes = self.missing.take_waiting(key)
            if found == LIVE or writes is not None:
                self.place_in_log.arrived(key, order, now)
            if writes is not None:
                base = None if found == ABSENT else RowState(
                    int(rows.versions[i]), rows.rows[i].copy() if found == LIVE else None
                )  # fmt: skip
                state = self._caught_up(base, order, writes)
                if state is not None:
                    states[key] = state
            elif found == LIVE:
                fills.append(i)
            else:
                self.counts["absent"] += 1
                self.missing.remember_absent(key, until_s, sure=found == ABSENT)
        self._fill(rows, np.array(fills, np.int64))
        self._settle(states)

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
            entries = self.entries(rows.keys[at], rows.versions[at], alive, rows.rows[at], dirty=False)
            self.place(entries, force=True)

    def _failed(self, keys: I64) -> None:
        self.counts["failed"] += keys.size
        until_s = self._clock.monotonic_s() + _FAILED_FOR_S
        for key in keys.tolist():
            if self.missing.waits(key):
                self.missing.ask_again(key)
            else:
                self.missing.remember_absent(key, until_s, sure=False)
