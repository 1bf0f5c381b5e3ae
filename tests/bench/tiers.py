"""`python -m tests.bench.tiers`: what a bounded table costs and how many rows it has when they are asked for.

Hit rate: requests of 500 keys under Zipf 1.05, room for a tenth of the rows, rows fetched in the background, beside the
best set of as many rows that never changes (the most frequent ones, known beforehand). Overhead: lookups and writes of
rows that are held, beside the plain table. Fills and evictions: through a real Redis on loopback.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from infra import garbage
from infra.clock import SystemClock
from infra.embedded import EmbeddedRedis
from param_server.cold import LIVE, N_FLOORS, ColdRows, ColdStore
from param_server.contract import Op
from param_server.eviction import Policy
from param_server.ferry import Event, Ferry, Fetched, Floors, Lane, Stored
from param_server.holding import TierRules
from param_server.leaving import Departure
from param_server.residents import Residents
from param_server.table import EmbeddingTable, Export, RowBatch
from param_server.table.cpu import CpuTable
from param_server.table.cpu import warm as warm_plain
from param_server.table.evicting import EvictingTable, warm
from param_server.tiers import TieredTable
from tests.bench.table import seconds

DIM = 64
PER_REQUEST = 500


class NearLane:
    """A cold tier that answers by the next turn: hit rates depend on which rows are kept, not on Redis."""

    def __init__(self) -> None:
        self._events: list[Event] = [Floors(np.zeros(N_FLOORS, np.uint64), lost=False)]

    def read(self, number: int, keys: np.ndarray) -> None:
        n = keys.size
        versions, rows = np.ones(n, np.uint64), np.zeros((n, DIM), np.float32)
        found = np.full(n, LIVE, np.uint8)
        self._events.append(Fetched(number, keys, ColdRows(keys, found, versions, versions, rows)))

    def write(self, rows: list[Departure]) -> None:
        self._events.append(Stored(rows))

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken


def make(hot: int, warm_rows: int, rules: TierRules, lane: Lane | None) -> TieredTable:
    """A tiered table in host memory."""
    tables = [
        EvictingTable(dim=DIM, capacity_rows=n, default_row=np.zeros(DIM, np.float32), policy=rules.policy)
        for n in (hot, warm_rows)
        if n
    ]
    return TieredTable(Residents(tables[0], tables[1] if warm_rows else None), rules, lane, SystemClock())


def hit_rates(n_rows: int, n_requests: int, exponent: float) -> None:
    """Rates over the second half of the requests."""
    rng = np.random.default_rng(1)
    keys = rng.permutation(rng.integers(-(2**63), 2**63 - 1, n_rows))
    weights = np.arange(1, n_rows + 1) ** -exponent
    ranks = rng.choice(n_rows, size=(n_requests, PER_REQUEST), p=weights / weights.sum())
    room = n_rows // 10
    best = float((ranks[n_requests // 2 :] < room).mean())
    print(f"\nhit rate, {n_rows:,} rows, room for {room:,}, Zipf {exponent}, {n_requests:,} requests of {PER_REQUEST}")
    print(f"{'best set that never changes':<44} {best:8.2%}")
    for name, rules, shape in (
        ("lfu", TierRules(policy=Policy("lfu", half_life_s=3600)), (room, 0)),
        ("lfu, asked for twice", TierRules(policy=Policy("lfu", half_life_s=3600), admission_threshold=2), (room, 0)),
        ("lfu, half hot and half warm", TierRules(policy=Policy("lfu", half_life_s=3600)), (room // 2, room // 2)),
        ("lru", TierRules(policy=Policy("lru")), (room, 0)),
    ):
        table = make(*shape, rules, NearLane())
        found = 0
        for i, request in enumerate(ranks):
            have = table.lookup(keys[request])[1]
            found += int(have.sum()) if i >= n_requests // 2 else 0
            table.turn()
        rate = found / (n_requests - n_requests // 2) / PER_REQUEST
        print(f"{name:<44} {rate:8.2%}   {100 * (rate - best):+.2f} points")


def overhead(n_rows: int) -> None:
    """Lookups and writes of held rows; above 1 the tiers take longer."""
    rng = np.random.default_rng(0)
    keys = rng.permutation(rng.integers(-(2**63), 2**63 - 1, n_rows))
    rows = rng.standard_normal((n_rows, DIM)).astype(np.float32)
    plain = CpuTable(dim=DIM, capacity_rows=n_rows, default_row=np.zeros(DIM, np.float32))
    tiered = make(n_rows, 0, TierRules(), NearLane())
    versions = np.ones(n_rows, np.uint64)
    plain.apply(RowBatch(Op.ASSIGN, keys, versions, rows))
    tiered.restore(Export(keys, versions, np.zeros(n_rows, np.bool_), rows), lambda: None)
    print(f"\n{n_rows:,} rows of {DIM} f32, all held; bytes {tiered.bytes / plain.bytes:.2f} x the plain table's")
    for n in (64, 500, 4096):
        wanted = keys[rng.integers(0, n_rows, n)]
        assert tiered.lookup(wanted)[1].all()
        show(f"lookup {n}", n, *in_turns(lambda w=wanted: plain.lookup(w), lambda w=wanted: tiered.lookup(w)))  # type: ignore[misc]
    at = rng.permutation(n_rows)[:1024]
    version = 1

    def put(table: EmbeddingTable) -> None:
        nonlocal version
        version += 1
        table.apply(RowBatch(Op.ASSIGN, keys[at], np.full(1024, version, np.uint64), rows[at]))

    show("assign 1024", 1024, *in_turns(lambda: put(plain), lambda: put(tiered)))


def in_turns(a: Callable[[], object], b: Callable[[], object]) -> tuple[float, float]:
    """Best times of both, measured in turns."""
    pairs = [(seconds(a, 1), seconds(b, 1)) for _ in range(9)]
    return min(x for x, _ in pairs), min(y for _, y in pairs)


def show(name: str, n: int, plain_s: float, tiered_s: float) -> None:
    print(
        f"{name:<44} {tiered_s * 1e6:10.1f} us  {n / tiered_s / 1e6:7.2f} M rows/s  {tiered_s / plain_s:5.2f} x plain"
    )


def through_redis(n_rows: int) -> None:
    """Fills and evictions with a Redis of our own."""
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis(Path(folder))
        redis.start()
        redis.wait_ready()
        try:
            _through_redis(n_rows, redis.url)
        finally:
            redis.stop()


def _through_redis(n_rows: int, url: str) -> None:
    woken = threading.Event()
    ferry = Ferry(ColdStore(url, "bench"), woken.set, "")
    ferry.start()
    table = make(n_rows // 10, 0, TierRules(policy=Policy("lru")), ferry.lane(1, DIM))
    keys = np.arange(n_rows, dtype=np.int64)
    rows = np.random.default_rng(0).standard_normal((n_rows, DIM)).astype(np.float32)
    try:
        print(f"\nthrough Redis, {n_rows:,} rows of {DIM} f32, room for {n_rows // 10:,}")
        start_s = time.perf_counter()
        table.restore(
            Export(keys, np.ones(n_rows, np.uint64), np.zeros(n_rows, np.bool_), rows), lambda: ferry.wait(0.1)
        )
        settle(table, ferry)
        spent = time.perf_counter() - start_s
        print(f"{'put rows of which nine in ten go down':<44} {n_rows / spent / 1e3:8.0f} k rows/s")
        for n in (1, 100, 1000):
            times = [fill_s(table, woken, keys, n, i) for i in range(60)]
            p50, p99 = np.percentile(times, [50, 99]) * 1e3
            print(f"{f'missing until there, {n} rows':<44} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms")
        start_s, n_new, stall = time.perf_counter(), 64, 0.0
        for i in range(n_new):
            fresh = np.arange(1024, dtype=np.int64) + n_rows + 1024 * i
            begin_s = time.perf_counter()
            table.apply(RowBatch(Op.ASSIGN, fresh, np.full(1024, 2 + i, np.uint64), rows[:1024]))
            table.turn()
            stall = max(stall, time.perf_counter() - begin_s)
        applied_s = time.perf_counter() - start_s
        settle(table, ferry)
        stored_s = time.perf_counter() - start_s
        print(f"{'assign 1024 new keys, as many evicted':<44} {1024 * n_new / applied_s / 1e3:8.0f} k rows/s, "
              f"stored {1024 * n_new / stored_s / 1e3:.0f} k rows/s, longest {stall * 1e3:.1f} ms")  # fmt: skip
    finally:
        ferry.stop()


def settle(table: TieredTable, ferry: Ferry) -> None:
    """Until everything is below."""
    table.turn()
    while table.leaving or table.asked:
        ferry.wait(0.05)
        table.turn()


def fill_s(table: TieredTable, woken: threading.Event, keys: np.ndarray, n: int, i: int) -> float:
    """Time from the first lookup to the first that finds all rows, none of which was held."""
    wanted = keys[(np.arange(n) + i * n) % (keys.size // 2)]
    begin_s = time.perf_counter()
    first = table.lookup(wanted)[1]
    table.turn()
    while not table.lookup(wanted)[1].all():
        woken.wait(0.05)
        woken.clear()
        table.turn()
    return 0.0 if first.all() else time.perf_counter() - begin_s


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--exponent", type=float, default=1.05)
    given = parser.parse_args()
    warm_plain()
    warm()
    # As a shard does.
    sys.setswitchinterval(0.0005)
    garbage.settle()
    hit_rates(given.rows, given.requests, given.exponent)
    overhead(given.rows)
    through_redis(min(given.rows, 100_000))


if __name__ == "__main__":
    main()
