"""`python -m tests.bench.table`: lookup, apply and topk of one table on one core, beside numpy and a dict.

numpy is a fancy index with known row numbers, so it does not probe: what a table without an index would cost. The dict
holds one array per key and is what a hand-written store does. Same keys, same output array, best of several runs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable

import numpy as np

from param_server.contract import Op
from param_server.table import RowBatch
from param_server.table.cpu import CpuTable, warm


def seconds(work: Callable[[], object], repeats: int = 7, least_s: float = 0.05) -> float:
    """Best time of one call."""
    best = float("inf")
    for _ in range(repeats):
        n, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < least_s or n == 0:
            work()
            n += 1
        best = min(best, spent / n)
    return best


def show(name: str, n: int, spent: float, beside: dict[str, float]) -> None:
    """One line: rate, time, and the ratio to each peer (above 1: the table is faster)."""
    ratios = "  ".join(f"{other} {time_s / spent:6.2f} x" for other, time_s in beside.items())
    print(f"{name:<34} {n / spent / 1e6:8.2f} M rows/s {spent * 1e6:10.1f} us   {ratios}")


def measure(n_rows: int, dim: int) -> None:
    """All figures for one size."""
    rng = np.random.default_rng(0)
    keys = rng.permutation(rng.integers(-(2**63), 2**63 - 1, n_rows))
    rows = rng.standard_normal((n_rows, dim)).astype(np.float32)
    table = CpuTable(dim=dim, capacity_rows=int(n_rows * 1.25), default_row=np.zeros(dim, np.float32))
    version = 0

    def put(op: Op, chosen: np.ndarray) -> None:
        nonlocal version
        version += 1
        table.apply(RowBatch(op, keys[chosen], np.full(chosen.size, version, np.uint64), rows[chosen]))

    put(Op.ASSIGN, np.arange(n_rows))
    as_dict = dict(zip(keys.tolist(), rows, strict=True))
    print(f"\n{n_rows:,} rows of {dim} f32, {table.bytes / rows.nbytes / 1.25:.2f} bytes kept per byte of payload")
    for n in (64, 500, 4096, 65536):
        at = rng.integers(0, n_rows, n)
        wanted, listed = keys[at], keys[at].tolist()
        out = np.empty((n, dim), np.float32)
        peers = {
            "numpy": seconds(lambda at=at: rows[at]),  # type: ignore[misc]
            "dict": seconds(lambda x=listed, o=out: np.stack([as_dict[k] for k in x], out=o)),  # type: ignore[misc]
        }
        show(f"lookup {n}", n, seconds(lambda w=wanted: table.lookup(w)), peers)  # type: ignore[misc]
    for op in (Op.ASSIGN, Op.ADD):
        at = rng.permutation(n_rows)[:1024]
        peers = {"numpy": seconds(lambda at=at: rows.__setitem__(at, rows[at]))}  # type: ignore[misc]
        show(f"{op.name.lower()} 1024", 1024, seconds(lambda o=op, at=at: put(o, at)), peers)  # type: ignore[misc]
    query = rng.standard_normal((1, dim)).astype(np.float32)
    peers = {"numpy": seconds(lambda: numpy_topk(rows, query[0], 500))}
    show("topk 500", n_rows, seconds(lambda: table.topk(query, 500)), peers)


def numpy_topk(rows: np.ndarray, query: np.ndarray, k: int) -> np.ndarray:
    """The peer: product, partition, sort, gather; without ties, deletions or exclusions."""
    scores = rows @ query
    best = np.argpartition(scores, -k)[-k:]
    return rows[best[np.argsort(-scores[best])]]


def main() -> None:
    """Measure the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1682, 100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=32)
    given = parser.parse_args()
    warm()
    for n_rows in given.rows:
        measure(n_rows, given.dim)


if __name__ == "__main__":
    main()
