"""A tiered table whose cold tier answers when the test says so, and a model that knows every state there ever was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from param_server.cold import ABSENT, DELETED, LIVE, N_FLOORS, ColdRows, floor_of
from param_server.contract import Op
from param_server.eviction import Policy
from param_server.ferry import Event, Fetched, Floors, Stored
from param_server.holding import TierRules
from param_server.leaving import Departure
from param_server.residents import Residents
from param_server.table import Applied, Export, RowBatch
from param_server.table.evicting import EvictingTable
from param_server.table.tier import TierTable
from param_server.tiers import TieredTable
from tests.tables import need_triton

DIM = 2
DEFAULT = np.full(DIM, 9.0, np.float32)


class FakeClock:
    def __init__(self) -> None:
        self.s = 1000.0

    def monotonic_s(self) -> float:
        return self.s

    def now_us(self) -> int:
        return int(self.s * 1e6)


class ColdDict:
    """What `cold.ColdStore` promises, over a dict: key -> (version, order, value or None)."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, np.ndarray | None]] = {}
        self.floors = np.zeros(N_FLOORS, np.uint64)

    def write(self, rows: list[Departure]) -> None:
        for row in rows:
            old = self.rows.get(row.key)
            if old is None or (row.state.version, row.order) > old[:2]:
                self.rows[row.key] = (row.state.version, row.order, row.state.row)
            bucket = floor_of(np.array([row.key]))[0]
            self.floors[bucket] = max(int(self.floors[bucket]), row.state.version)

    def read(self, keys: np.ndarray) -> ColdRows:
        n = keys.size
        found, versions, orders = np.zeros(n, np.uint8), np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        rows = np.zeros((n, DIM), np.float32)
        for i, key in enumerate(keys.tolist()):
            if key not in self.rows:
                found[i] = ABSENT
                continue
            versions[i], orders[i], value = self.rows[key]
            found[i] = DELETED if value is None else LIVE
            if value is not None:
                rows[i] = value
        return ColdRows(keys, found, versions, orders, rows)


class ManualLane:
    """A lane that does each half of its work when told: Redis acts, and then the answer arrives."""

    def __init__(self, cold: ColdDict) -> None:
        self.cold = cold
        self.asked: deque[tuple[int, np.ndarray]] = deque()
        self.sent: deque[list[Departure]] = deque()
        self.answers: deque[Event] = deque()
        self.events: list[Event] = []

    def read(self, number: int, keys: np.ndarray) -> None:
        self.asked.append((number, keys))

    def write(self, rows: list[Departure]) -> None:
        self.sent.append(rows)

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken

    def meet(self) -> None:
        """Redis is seen for the first time."""
        self.events.append(Floors(self.cold.floors.copy(), lost=False))

    def lose(self) -> None:
        """Redis came back without its rows."""
        self.cold.floors[:] = 0
        self.events.append(Floors(self.cold.floors.copy(), lost=True))

    def act_read(self) -> None:
        if self.asked:
            number, keys = self.asked.popleft()
            self.answers.append(Fetched(number, keys, self.cold.read(keys)))

    def fail_read(self) -> None:
        if self.asked:
            number, keys = self.asked.popleft()
            self.answers.append(Fetched(number, keys, None))

    def act_write(self) -> None:
        if self.sent:
            rows = self.sent.popleft()
            self.cold.write(rows)
            self.answers.append(Stored(rows))

    def deliver(self) -> None:
        if self.answers:
            self.events.append(self.answers.popleft())

    def settle(self) -> None:
        while self.asked or self.sent or self.answers:
            self.act_write()
            self.act_read()
            self.deliver()

    @property
    def idle(self) -> bool:
        return not (self.asked or self.sent or self.answers or self.events)


def tiered(
    hot_rows: int, warm_rows: int = 0, lane: ManualLane | None = None, rules: TierRules | None = None,
    clock: FakeClock | None = None, *, dim: int = DIM, default: np.ndarray = DEFAULT, on_gpu: bool = False,
) -> TieredTable:  # fmt: skip
    """`on_gpu`: the hot tier has the size it has there, whatever `hot_rows`."""
    rules = rules or TierRules()

    def tier(rows: int) -> EvictingTable:
        return EvictingTable(dim=dim, capacity_rows=rows, default_row=default, policy=rules.policy)

    hot: TierTable = gpu_tier(dim, default, rules.policy) if on_gpu else tier(hot_rows)
    residents = Residents(hot, tier(warm_rows) if warm_rows else None)
    return TieredTable(residents, rules, lane, clock or FakeClock())


def gpu_tier(dim: int, default: np.ndarray, policy: Policy) -> TierTable:
    """A hot tier on the GPU, or in Triton's interpreter where there is none."""
    need_triton()
    from param_server.table.gpu_tier import GpuTierTable

    return GpuTierTable(dim=dim, slots=8, default_row=default, policy=policy)


def settled(table: TieredTable, lane: ManualLane) -> None:
    """Let everything that is under way arrive."""
    table.turn()
    while not lane.idle:
        lane.settle()
        table.turn()


@dataclass(frozen=True)
class LogRecord:
    op: Op
    rows: tuple[tuple[int, int, float], ...]  # key, version, value
    versioned: bool

    def batch(self, order: int | None = None) -> RowBatch:
        keys, versions, values = ([row[i] for row in self.rows] for i in range(3))
        n = 0 if self.op is Op.DELETE else len(keys)
        rows = np.repeat(np.array(values[:n], np.float32)[:, None], DIM, axis=1).reshape(n, DIM)
        return RowBatch(self.op, np.array(keys, np.int64), np.array(versions, np.uint64), rows, self.versioned, order)


State = dict[int, tuple[int, float | None]]


def after(state: State, record: LogRecord) -> State:
    """The state after a record, a row at a time: what one table that holds everything would be."""
    state = dict(state)
    rows = list(record.rows)
    if record.op is not Op.ADD:
        newest: dict[int, tuple[int, float]] = {}
        for key, version, value in rows:
            if key not in newest or version >= newest[key][0]:
                newest[key] = (version, value)
        rows = [(key, *newest[key]) for key in newest]
    for key, version, value in rows:
        stored, old = state.get(key, (-1, None))
        if record.op is Op.ADD:
            if not record.versioned or version > stored:
                state[key] = (max(stored, version), (old or 0.0) + value)
        elif version > stored:
            state[key] = (version, None if record.op is Op.DELETE else value)
    return state


def export_of(state: State) -> Export:
    keys = np.array(list(state), np.int64)
    versions = np.array([version for version, _ in state.values()], np.uint64)
    dead = np.array([value is None for _, value in state.values()], np.bool_)
    values = np.array([value or 0.0 for _, value in state.values()], np.float32)
    return Export(keys, versions, dead, np.repeat(values[:, None], DIM, axis=1).reshape(len(state), DIM))


def write(table: TieredTable, op: Op, keys: list[int], versions: list[int], value: float = 1.0) -> Applied:
    return table.apply(LogRecord(op, tuple((k, v, value) for k, v in zip(keys, versions, strict=True)), False).batch())


def value_of(table: TieredTable, key: int) -> float | None:
    rows, found = table.lookup(np.array([key]))
    return float(rows[0, 0]) if found[0] else None
