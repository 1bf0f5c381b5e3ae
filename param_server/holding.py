"""Puts rows where they belong: held, or on their way down. For one table and one owner thread; does no I/O.

Invariant: above a cold tier only live rows are held; a row leaves only into `leaving`, unless it came from below and
never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from infra.clock import Clock
from param_server.contract import F32, I64, U64
from param_server.eviction import Policy
from param_server.leaving import Leaving
from param_server.placeinlog import PlaceInLog
from param_server.residents import Residents
from param_server.rowstate import RowState
from param_server.sketch import CountingSketch
from param_server.table import Bool
from param_server.table.tier import Entries

_LEAST_COUNTED = 1024

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


class Holding:
    """`residents` and what is on its way from them to the cold tier, if there is one."""

    def __init__(self, residents: Residents, rules: TierRules, clock: Clock, *, has_cold: bool) -> None:
        self.residents = residents
        self.has_cold = has_cold
        self.sketch = CountingSketch(max(_LEAST_COUNTED, sum(table.capacity_rows for table in residents.tables)))
        self.place_in_log = PlaceInLog()
        self.leaving = Leaving()
        self.dropped = 0
        self.tick = 0
        self._rules = rules
        self._clock = clock
        self._born_s = clock.monotonic_s()

    def pass_time(self) -> None:
        """Let uses from now on count as of now, and let go of what has been held too long."""
        age_s = self._clock.monotonic_s() - self._born_s
        self.tick = self._rules.policy.tick(age_s)
        if limit := self._rules.policy.expired_below(age_s):
            self.descend(self.residents.expire(limit))

    def entries(self, keys: I64, versions: U64, tombstones: Bool, rows: F32, *, dirty: bool = True) -> Entries:
        """Entries that arrive now, scored by how often their keys were asked for."""
        scores = self._rules.policy.fresh(self.sketch.estimate(keys), self.tick)
        return Entries(keys, versions, tombstones, rows, scores, np.full(keys.size, dirty, np.bool_))

    def place(self, entries: Entries, *, force: bool) -> None:
        """Hold entries of keys that are not held; what they displace, and above a cold tier tombstones, goes down."""
        if self.has_cold and entries.tombstones.any():
            self.descend(entries.take(entries.tombstones))
            entries = entries.take(~entries.tombstones)
        self.descend(self.residents.place(entries, force=force))

    def bury(self, keys: I64) -> None:
        """Keys were deleted: their tombstones are not to be held above a cold tier."""
        if self.has_cold:
            self.descend(self.residents.bury(keys))

    def descend(self, down: Entries) -> None:
        """Send down what is no longer held; what came from below and never changed is there already."""
        if not down.n:
            return
        counts = np.minimum(self._rules.policy.counts(down.scores, self.tick), 255)
        self.sketch.raise_to(down.keys, counts.astype(np.uint8))
        if self.has_cold:
            going = np.flatnonzero(down.dirty | down.tombstones)
            self.dropped += down.n - going.size
            down = down.take(going)
        self._leave(down.keys, down.versions, down.tombstones, down.rows)

    def arrive(self, keys: I64, versions: U64, dead: Bool, rows: F32) -> None:
        """New states of distinct keys that are not here yet: put them where the rules say."""
        if not keys.size:
            return
        held = self._to_hold(keys, dead)
        if not held.all():
            at = np.flatnonzero(~held)
            self._leave(keys[at], versions[at], dead[at], rows[at])
            at = np.flatnonzero(held)
            keys, versions, dead, rows = keys[at], versions[at], dead[at], rows[at]
        if keys.size:
            self.place(self.entries(keys, versions, dead, rows), force=True)

    def arrive_each(self, states: Mapping[int, RowState]) -> None:
        """The same, one by one."""
        if states:
            zeros = np.zeros(self.residents.hot.dim, np.float32)
            dead = np.array([state.row is None for state in states.values()])
            versions = np.array([state.version for state in states.values()], np.uint64)
            rows = np.stack([zeros if state.row is None else state.row for state in states.values()])
            self.arrive(np.fromiter(states, np.int64, len(states)), versions, dead, rows)

    def _leave(self, keys: I64, versions: U64, tombstones: Bool, rows: F32) -> None:
        orders = self.place_in_log.up_to(keys)
        dead = tombstones.tolist()
        for i, (key, version) in enumerate(zip(keys.tolist(), versions.tolist(), strict=True)):
            # Rows of one batch leave at about the same time: a view of them keeps nothing for long.
            self.leaving.put(key, RowState(version, None if dead[i] else rows[i]), orders[i])

    def _to_hold(self, keys: I64, dead: Bool) -> Bool:
        if not self.has_cold:
            return np.ones(keys.size, np.bool_)
        if self._rules.new_keys == "insert":
            return ~dead
        if self._rules.new_keys == "cold_only":
            return np.zeros(keys.size, np.bool_)
        return ~dead & (self.sketch.estimate(keys) >= self._rules.admission_threshold)
