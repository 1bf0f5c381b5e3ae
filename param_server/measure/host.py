"""The table in host memory, on one core, beside numpy and a dict.

numpy indexes rows whose numbers it knows, so it does not probe: what a table without an index would cost. The dict
holds an array per key, as a hand-written store does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from param_server.contract import F32, I64, Op
from param_server.measure.lines import Line, Spent, check, in_turns
from param_server.table import RowBatch
from param_server.table.cpu import CpuTable, warm

SETS = 64
KEYS = (64, 500, 2000, 4096, 65536)
BATCHES = (1024, 8192)
ARRIVALS_PER_S = 1000
STALL_KEYS = 2000
RECORD_ROWS = 1024
TOPK = 500


@dataclass(frozen=True, slots=True)
class Filled:
    """A table, its keys i64[rows] and the same rows f32[rows, dim] in a plain array."""

    table: CpuTable
    keys: I64
    rows: F32

    def put(self, op: Op, chosen: I64, version: int) -> int:
        """Write some rows again; how many were applied."""
        versions = np.full(chosen.size, version, np.uint64)
        return self.table.apply(RowBatch(op, self.keys[chosen], versions, self.rows[chosen])).applied


def filled(n_rows: int, dim: int) -> Filled:
    """Random keys and rows."""
    warm()
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, n_rows))
    keys = rng.permutation(keys)
    rows = rng.standard_normal((keys.size, dim)).astype(np.float32)
    table = CpuTable(dim=dim, capacity_rows=int(n_rows * 1.25) + 1, default_row=np.zeros(dim, np.float32))
    made = Filled(table, keys, rows)
    made.put(Op.ASSIGN, np.arange(keys.size), 1)
    return made


def lookup(n_rows: int, dim: int, seconds: float) -> list[Line]:
    """Lookups of resident keys; 64 sets take turns, so that no call finds the rows of the last one in the cache."""
    made = filled(n_rows, dim)
    as_dict = dict(zip(made.keys.tolist(), made.rows, strict=True))
    lines: list[Line] = []
    for n in KEYS:
        at = np.random.default_rng(1).integers(0, made.keys.size, (SETS, n))
        wanted = made.keys[at]
        listed = [some.tolist() for some in wanted[:4]]
        out = np.empty((n, dim), np.float32)
        rows, found = made.table.lookup(wanted[0])
        check(bool(found.all()) and np.array_equal(rows, made.rows[at[0]]), "lookup")
        calls: dict[str, Callable[[int], object]] = {
            f"lookup of {n} keys": lambda i, wanted=wanted: made.table.lookup(wanted[i % SETS]),  # type: ignore[misc]
            "  numpy, rows known": lambda i, at=at: made.rows[at[i % SETS]],  # type: ignore[misc]
            "  a dict of arrays": lambda i, listed=listed, out=out: np.stack(  # type: ignore[misc]
                [as_dict[key] for key in listed[i % 4]], out=out
            ),
        }
        lines += _lines(n, in_turns(calls, seconds / len(KEYS)))
    payload = made.rows.nbytes * 1.25
    return [*lines, Line("memory over place for rows", 0.0, made.table.bytes / payload, "x", "<= 1.15 at dim 64")]


def apply(n_rows: int, dim: int, seconds: float) -> list[Line]:
    """Writes to resident rows, beside the same rows written by number into a plain array."""
    made = filled(n_rows, dim)
    lines: list[Line] = []
    version = 1
    for n in BATCHES:
        n = min(n, made.keys.size)
        for op in (Op.ASSIGN, Op.ADD):
            rng = np.random.default_rng(2)
            at = [rng.permutation(made.keys.size)[:n] for _ in range(8)]
            plain = made.rows.copy()

            def written(i: int, op: Op = op, at: list[I64] = at) -> None:
                nonlocal version
                version += 1
                check(made.put(op, at[i % 8], version) == at[i % 8].size, "apply")

            calls: dict[str, Callable[[int], object]] = {
                f"{op.name.lower()} of {n} rows": written,
                "  numpy, rows known": lambda i, at=at, plain=plain: plain.__setitem__(  # type: ignore[misc]
                    at[i % 8], made.rows[at[i % 8]]
                ),
            }
            lines += _lines(n, in_turns(calls, seconds / 4))
    return lines


def topk(n_rows: int, dim: int, seconds: float) -> list[Line]:
    """Exact recall of 500 rows, beside a product, a partition and a sort without ties, deletions or exclusions."""
    made = filled(n_rows, dim)
    queries = np.random.default_rng(3).standard_normal((8, dim)).astype(np.float32)
    k = min(TOPK, made.keys.size)

    def plain(i: int) -> I64:
        scores = made.rows @ queries[i % 8]
        best = np.argpartition(scores, -k)[-k:]
        return best[np.argsort(-scores[best])]

    best = made.table.topk(queries[:1], k)[0]
    check(set(best.keys.tolist()) == set(made.keys[plain(0)].tolist()), "topk")
    calls: dict[str, Callable[[int], object]] = {
        f"topk {k} of {made.keys.size} rows, one query": lambda i: made.table.topk(queries[i % 8 : i % 8 + 1], k),
        "  numpy: product, partition, sort": plain,
    }
    spent = in_turns(calls, seconds)
    return [Line(name, s.wall_us, 1e6 / s.wall_us, "/s", cpu_us=s.cpu_us) for name, s in spent.items()]


def stall(n_rows: int, dim: int, seconds: float, rows_per_s: int = 100_000) -> list[Line]:
    """Lookups of 2,000 keys that arrive on a schedule, idle and while rows are applied by the same thread.

    Times are from the arrival, so that a lookup that had to wait for a record shows it; by the clock of the thread's
    own processor time, which stands still while others have the core.
    """
    made = filled(n_rows, dim)
    lines: list[Line] = []
    at_99: list[float] = []
    for name, rate in (("idle", 0), (f"{rows_per_s} rows/s applied", rows_per_s)):
        waited, applied = _answered(made, seconds / 2, rate)
        for percent in (50, 99, 100):
            us = float(np.percentile(waited, percent))
            lines.append(Line(f"lookup of {STALL_KEYS} keys, {name}, p{percent}", us, len(waited), "lookups"))
        at_99.append(float(np.percentile(waited, 99)))
    lines.append(Line("p99, applied over idle", 0.0, at_99[1] / at_99[0], "x", "<= 1.5"))
    lines.append(Line("rows applied meanwhile", 0.0, applied / (seconds / 2) / 1e3, "k rows/s"))
    return lines


def _answered(made: Filled, seconds: float, rows_per_s: int) -> tuple[list[float], int]:
    rng = np.random.default_rng(4)
    wanted = made.keys[rng.integers(0, made.keys.size, (SETS, STALL_KEYS))]
    writes = rng.integers(0, made.keys.size, (SETS, RECORD_ROWS))
    waited: list[float] = []
    made.table.lookup(wanted[0])
    begin_s = time.thread_time()
    applied = 0
    for i in range(int(seconds * ARRIVALS_PER_S)):
        due_s = begin_s + i / ARRIVALS_PER_S
        while (now_s := time.thread_time()) < due_s:
            # As in a shard: a record at a time, then a look at who has arrived.
            if applied < (now_s - begin_s) * rows_per_s:
                made.put(Op.ASSIGN, writes[i % SETS], 2 + applied)
                applied += RECORD_ROWS
        made.table.lookup(wanted[i % SETS])
        waited.append((time.thread_time() - due_s) * 1e6)
    return waited, applied


def _lines(n: int, spent: dict[str, Spent]) -> list[Line]:
    return [Line(name, s.wall_us, n / s.wall_us, "M rows/s", cpu_us=s.cpu_us) for name, s in spent.items()]
