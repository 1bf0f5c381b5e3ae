"""Shards' tables that can crash, over one log and one cold tier, and every state that log has ever led to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.holding import TierRules
from param_server.residents import merged_exports
from param_server.table import Capture, Export
from tests.unit.param_server.tiered import (
    ColdDict,
    FakeClock,
    LogRecord,
    ManualLane,
    State,
    after,
    export_of,
    settled,
    tiered,
)

KEYS = range(8)
ORDER = 1000
RELEASE: State = {key: (1, float(100 + key)) for key in range(5)}
RULES = st.builds(
    TierRules,
    policy=st.sampled_from([Policy("lru"), Policy("lfu"), Policy("ttl", ttl_s=5.0)]),
    new_keys=st.sampled_from(["insert", "cold_only", "if_admitted"]),
    admission_threshold=st.sampled_from([1, 2]),
    most_leaving=st.just(4),
)


class Past:
    """What all replicas of a shard have in common. `reached`: how far any of them has been."""

    def __init__(self, *, log_versions: bool, names: Sequence[int] = KEYS) -> None:
        self.names = names
        self.log_versions = log_versions
        self.release: State = {names[i]: state for i, state in RELEASE.items()}
        self.clock = FakeClock()
        self.cold = ColdDict()
        self.log: list[LogRecord] = []
        self.states: list[State] = [self.release]
        self.reached = 0
        self.snapshot: tuple[int, Export] | None = None

    def grow(self, op: Op, rows: list[tuple[int, int, float]], versioned: bool) -> None:
        """One record more."""
        if self.log_versions:
            rows = [(key, ORDER + len(self.log), value) for key, _, value in rows]
            versioned = False
        named = tuple((self.names[key], version, value) for key, version, value in rows)
        self.log.append(LogRecord(op, named, versioned))
        self.states.append(after(self.states[-1], self.log[-1]))


class World:
    """A shard's table, its way to the cold tier, and where it stands in the log. Only the `first` writes snapshots."""

    def __init__(
        self, past: Past, hot: int, warm: int, rules: TierRules, *, first: bool = True, on_gpu: bool = False
    ) -> None:
        self.past = past
        self.sizes = (hot, warm)
        self.first = first
        self.on_gpu = on_gpu
        self.rules = rules
        self.run = 1
        self.start()

    def start(self) -> None:
        self.run = self.run % 4 + 1
        self.copying: tuple[int, Capture, list[Export]] | None = None
        past = self.past
        self.lane = ManualLane(past.cold)
        self.table = tiered(*self.sizes, self.lane, self.rules, past.clock, on_gpu=self.on_gpu)
        self.position = past.snapshot[0] if past.snapshot else 0
        self.table.follow(lambda keys: np.full(keys.size, ORDER + self.position, np.uint64))
        state = past.snapshot[1] if past.snapshot else export_of(past.release)
        assert self.table.restore(state, self.lane.settle, None if past.snapshot else past.cold.read)

    def apply(self, op: Op, rows: list[tuple[int, int, float]], versioned: bool) -> None:
        if self.table.hold:
            return
        log = self.past.log
        if self.position == len(log):
            self.past.grow(op, rows, versioned)
        first = self.position
        record = log[first]
        # As `updates.apply_records` does: the positions move before the rows.
        self.position += 1
        if self.past.log_versions and self.position % 3:
            # Neighbours are applied together, not the same ones after every crash.
            while self.position < min(len(log), first + self.run) and log[self.position].op is record.op:
                self.position += 1
            together = tuple(row for each in log[first : self.position] for row in each.rows)
            batch = LogRecord(record.op, together, False).batch()
        else:
            batch = record.batch(ORDER + first)
        done = self.table.apply(batch)
        assert done.applied + done.stale == batch.keys.size
        self.past.reached = max(self.past.reached, self.position)

    def lookup(self, keys: list[int]) -> None:
        wanted = [self.past.names[key] for key in keys]
        rows, found = self.table.lookup(np.array(wanted))
        for key, row, have in zip(wanted, rows.tolist(), found.tolist(), strict=True):
            if have:
                since = range(self.position, self.past.reached + 1)
                legal = [self.past.states[p].get(key, (0, None))[1] for p in since]
                assert row[0] == row[1]
                assert row[0] in legal, f"key {key} is {row[0]}, since position {self.position} it was {legal}"
            else:
                assert row == [9.0, 9.0]

    def copy(self) -> None:
        """One piece more of the snapshot, while everything changes."""
        if self.copying is not None:
            position, capture, pieces = self.copying
            piece = capture.take(1)
            if piece is not None:
                pieces.append(piece)
            else:
                whole = merged_exports(pieces)
                assert np.unique(whole.keys).size == whole.keys.size
                self.past.snapshot, self.copying = (position, whole), None

    def do(self, step: tuple[Any, ...]) -> None:
        name = step[0]
        self.copy()
        if name == "apply":
            self.apply(*step[1:])
        elif name == "lookup":
            self.lookup(step[1])
        elif name == "turn":
            self.table.turn()
        elif name == "later":
            self.past.clock.s += 3
        elif name == "fetch":
            self.table.fetch(np.array([self.past.names[key] for key in (1, 3, 6)]))
        elif name == "snapshot":
            if self.first and not self.table.unsettled:
                self.copying = (self.position, self.table.capture_all(), [])
        elif name == "crash":
            self.start()
        else:
            getattr(self.lane, name)()

    def asked_for(self, key: int) -> float | None:
        """The value, after it was asked for often enough to be fetched; it may be on its way out of a tier at first."""
        for _ in range(self.rules.admission_threshold + 3):
            rows, found = self.table.lookup(np.array([key]))
            if found[0]:
                return float(rows[0, 0])
            settled(self.table, self.lane)
        return None

    def finish(self) -> None:
        """Read the log to its end, wait for everything, and compare all rows."""
        self.lane.meet()
        while self.position < len(self.past.log):
            settled(self.table, self.lane)
            self.apply(Op.ASSIGN, [], versioned=False)
        settled(self.table, self.lane)
        self.past.clock.s += 100
        settled(self.table, self.lane)
        assert not self.table.unsettled
        for key in self.past.names:
            expected = self.past.states[-1].get(key, (0, None))[1]
            assert self.asked_for(key) == expected, f"key {key}"


WEIGHTS = {
    "apply": 12, "lookup": 10, "turn": 14, "act_read": 6, "act_write": 6, "deliver": 12, "fail_read": 1, "settle": 1,
    "later": 1, "snapshot": 1, "crash": 1, "fetch": 1, "meet": 1,
}  # fmt: skip


def a_step(chance: random.Random, keys: Sequence[int] = KEYS) -> tuple[Any, ...]:
    """Something that may happen next."""
    name = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if name == "apply":
        op = chance.choice([Op.ASSIGN, Op.ADD, Op.ADD, Op.DELETE])
        n = chance.randint(1, 3)
        rows = [(chance.choice(keys), chance.randint(0, 9), float(chance.randint(1, 8))) for _ in range(n)]
        return name, op, rows, chance.random() < 0.3
    if name == "lookup":
        return name, [chance.choice(keys) for _ in range(chance.randint(1, 3))]
    return (name,)
