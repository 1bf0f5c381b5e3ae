"""Whatever the order in which reads, writes, failures, crashes and replays happen: a row is never an older one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.holding import TierRules
from param_server.residents import merged_exports
from param_server.table import Capture, Export
from tests.tables import NUMPY_MAY_OVERFLOW
from tests.unit.param_server.table.test_gpu import neighbours
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
ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 9), st.integers(1, 8).map(float)), min_size=1, max_size=4
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from(list(Op)), ROWS, st.booleans()),
        st.tuples(st.just("lookup"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)),
        st.tuples(
            st.sampled_from(
                ["turn", "turn", "act_read", "fail_read", "act_write", "deliver", "deliver", "settle", "meet", "later",
                 "snapshot", "crash", "fetch"]
            )
        ),
    ),
    max_size=60,
)  # fmt: skip
RULES = st.builds(
    TierRules,
    policy=st.sampled_from([Policy("lru"), Policy("lfu"), Policy("ttl", ttl_s=5.0)]),
    new_keys=st.sampled_from(["insert", "cold_only", "if_admitted"]),
    admission_threshold=st.sampled_from([1, 2]),
    most_leaving=st.just(4),
)


class World:
    """A shard's table that can crash, its log, and every state the log has ever led to."""

    def __init__(
        self, hot: int, warm: int, rules: TierRules, *, log_versions: bool, names: Sequence[int] = KEYS,
        on_gpu: bool = False,
    ) -> None:  # fmt: skip
        self.sizes = (hot, warm)
        self.names = names
        self.on_gpu = on_gpu
        self.release: State = {names[i]: state for i, state in RELEASE.items()}
        self.rules = rules
        self.log_versions = log_versions
        self.clock = FakeClock()
        self.cold = ColdDict()
        self.log: list[LogRecord] = []
        self.states: list[State] = [self.release]
        self.reached = 0
        self.run = 1
        self.snapshot: tuple[int, Export] | None = None
        self.start()

    def start(self) -> None:
        self.run = self.run % 4 + 1
        self.copying: tuple[int, Capture, list[Export]] | None = None
        self.lane = ManualLane(self.cold)
        self.table = tiered(*self.sizes, self.lane, self.rules, self.clock, on_gpu=self.on_gpu)
        self.position = self.snapshot[0] if self.snapshot else 0
        self.table.follow(lambda keys: np.full(keys.size, ORDER + self.position, np.uint64))
        state = self.snapshot[1] if self.snapshot else export_of(self.release)
        assert self.table.restore(state, self.lane.settle, None if self.snapshot else self.cold.read)

    def apply(self, op: Op, rows: list[tuple[int, int, float]], versioned: bool) -> None:
        if self.table.hold:
            return
        if self.position == len(self.log):
            if self.log_versions:
                rows = [(key, ORDER + self.position, value) for key, _, value in rows]
                versioned = False
            named = tuple((self.names[key], version, value) for key, version, value in rows)
            self.log.append(LogRecord(op, named, versioned))
            self.states.append(after(self.states[-1], self.log[-1]))
        first = self.position
        record = self.log[first]
        # As `updates.apply_records` does: the positions move before the rows.
        self.position += 1
        if self.log_versions and self.position % 3:
            # Neighbours are applied together, not the same ones after every crash.
            while self.position < min(len(self.log), first + self.run) and self.log[self.position].op is record.op:
                self.position += 1
            together = tuple(row for each in self.log[first : self.position] for row in each.rows)
            batch = LogRecord(record.op, together, False).batch()
        else:
            batch = record.batch(ORDER + first)
        done = self.table.apply(batch)
        assert done.applied + done.stale == batch.keys.size
        self.reached = max(self.reached, self.position)

    def lookup(self, keys: list[int]) -> None:
        wanted = [self.names[key] for key in keys]
        rows, found = self.table.lookup(np.array(wanted))
        for key, row, have in zip(wanted, rows.tolist(), found.tolist(), strict=True):
            if have:
                legal = [self.states[p].get(key, (0, None))[1] for p in range(self.position, self.reached + 1)]
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
                self.snapshot, self.copying = (position, whole), None

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
            self.clock.s += 3
        elif name == "fetch":
            self.table.fetch(np.array([self.names[key] for key in (1, 3, 6)]))
        elif name == "snapshot":
            if not self.table.unsettled:
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
        while self.position < len(self.log):
            settled(self.table, self.lane)
            self.apply(Op.ASSIGN, [], versioned=False)
        settled(self.table, self.lane)
        self.clock.s += 100
        settled(self.table, self.lane)
        assert not self.table.unsettled
        for key in self.names:
            expected = self.states[-1].get(key, (0, None))[1]
            assert self.asked_for(key) == expected, f"key {key}"


@settings(deadline=None, max_examples=400)
@given(
    hot=st.integers(1, 4), warm=st.integers(0, 3), rules=RULES, log_versions=st.booleans(), steps=STEPS,
)  # fmt: skip
def test_any_interleaving_shows_only_rows_that_are_current_and_loses_none(
    hot: int, warm: int, rules: TierRules, log_versions: bool, steps: list[tuple[Any, ...]]
) -> None:
    world = World(hot, warm, rules, log_versions=log_versions)
    for step in steps:
        world.do(step)
    world.finish()


WEIGHTS = {
    "apply": 12, "lookup": 10, "turn": 14, "act_read": 6, "act_write": 6, "deliver": 12, "fail_read": 1, "settle": 1,
    "later": 1, "snapshot": 1, "crash": 1, "fetch": 1, "meet": 1,
}  # fmt: skip


def a_step(chance: random.Random, keys: Sequence[int] = KEYS) -> tuple[Any, ...]:
    name = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if name == "apply":
        op = chance.choice([Op.ASSIGN, Op.ADD, Op.ADD, Op.DELETE])
        n = chance.randint(1, 3)
        rows = [(chance.choice(keys), chance.randint(0, 9), float(chance.randint(1, 8))) for _ in range(n)]
        return name, op, rows, chance.random() < 0.3
    if name == "lookup":
        return name, [chance.choice(keys) for _ in range(chance.randint(1, 3))]
    return (name,)


@settings(deadline=None, max_examples=300)
@given(
    hot=st.integers(1, 3), warm=st.integers(0, 2), rules=RULES, log_versions=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_long_life_with_crashes_shows_only_rows_that_are_current_and_loses_none(
    hot: int, warm: int, rules: TierRules, log_versions: bool, seed: int
) -> None:
    chance = random.Random(seed)
    world = World(hot, warm, rules, log_versions=log_versions)
    world.do(("meet",))
    for _ in range(250):
        world.do(a_step(chance))
    world.finish()


@NUMPY_MAY_OVERFLOW
@settings(deadline=None, max_examples=4)  # each takes seconds in Triton's interpreter
@given(warm=st.sampled_from([0, 2]), rules=RULES, log_versions=st.booleans(), seed=st.integers(0, 2**32))
def test_a_life_with_the_hot_rows_on_a_gpu_shows_only_rows_that_are_current_and_loses_none(
    warm: int, rules: TierRules, log_versions: bool, seed: int
) -> None:
    chance = random.Random(seed)
    # Twelve keys of one bucket of eight: rows have to leave.
    world = World(0, warm, rules, log_versions=log_versions, names=neighbours(12).tolist(), on_gpu=True)
    world.do(("meet",))
    for _ in range(60):
        world.do(a_step(chance, range(12)))
    world.finish()
