"""`python -m tests.bench.split`: what an assignment costs, and whether ten million users keep their arms on a ramp.

The buckets come from `bucket_ppm` itself, in two processes of their own that must agree; the arms of each weight are
computed with `intervals`, which a unit test proves equal to `assign`. Ends with status 1 when anything is not as said.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np

from reranker.gray.split import PPM, SplitPlan, assign, bucket_ppm
from tests.unit.reranker.gray.test_split import RAMP, intervals

CHUNK = 1_000_000
REACH_US = 1.5


def main() -> int:
    """Print each figure and what it has to be; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.split", description=__doc__)
    options.add_argument("--users", type=int, default=10_000_000)
    n = options.parse_args().users
    good = [_assignment_cost()]
    one, other = _buckets("one", n), _buckets("two", n)
    good += [_says("other processes agree", bool((_buckets("one", n) == one).all()), f"{n:,} users")]
    good += [_ramp(one), *(_share(one, weight) for weight in RAMP[:-1]), _independence(one, other)]
    return 0 if all(good) else 1


def _assignment_cost() -> bool:
    plan = SplitPlan("a", "salt", "b", 250_000, 10_000, {"vip": "candidate"})
    users = [f"user-{i}" for i in range(1000)]
    took_us = []
    for _ in range(500):
        start = time.perf_counter()
        for user in users:
            assign(plan, user, user)
        took_us.append((time.perf_counter() - start) * 1e6 / len(users))
    p50, p99 = np.percentile(took_us, [50, 99])
    return _says(
        f"assignment <= {REACH_US} us p50", p50 <= REACH_US, f"p50 {p50:.2f} us, p99 of 1,000 each {p99:.2f} us"
    )


def _ramp(buckets: np.ndarray) -> bool:
    before = np.zeros(buckets.size, bool)
    changes = 0
    for weight in RAMP:
        now = intervals(SplitPlan("a", "one", "b", weight), buckets)[0]
        changes += int(np.count_nonzero(before & ~now))
        before = now
    ramp = " -> ".join(f"{w / PPM:.0%}" for w in RAMP)
    return _says(
        "nobody loses the candidate release", changes == 0 and bool(before.all()), f"{changes} changes, {ramp}"
    )


def _share(buckets: np.ndarray, weight: int) -> bool:
    n, p = buckets.size, weight / PPM
    served = np.count_nonzero(intervals(SplitPlan("a", "one", "b", weight), buckets)[0])
    sigmas = (served - n * p) / math.sqrt(n * p * (1 - p))
    return _says(f"{p:.0%} within 3 sigma", abs(sigmas) <= 3, f"{served / n:.4%}, {sigmas:+.2f} sigma")


def _independence(one: np.ndarray, other: np.ndarray) -> bool:
    cells = np.bincount(one * 100 // PPM * 100 + other * 100 // PPM, minlength=10_000).reshape(100, 100)
    expected = cells.sum(1, keepdims=True) * cells.sum(0, keepdims=True) / cells.sum()
    chi2, freedom = float(((cells - expected) ** 2 / expected).sum()), 99 * 99
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    z = ((chi2 / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    p_value = 0.5 * math.erfc(z / math.sqrt(2))
    return _says("two salts are independent", p_value > 0.001, f"chi-square {chi2:.0f} of {freedom}, p = {p_value:.3f}")


def _buckets(salt: str, n: int) -> np.ndarray:
    """Buckets of user-0 .. user-(n-1), made by fresh processes."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return np.concatenate(list(pool.map(partial(_chunk, salt, n), range(0, n, CHUNK))))


def _chunk(salt: str, n: int, start: int) -> np.ndarray:
    ids: Iterator[int] = iter(range(start, min(n, start + CHUNK)))
    return np.fromiter((bucket_ppm(salt, f"user-{i}") for i in ids), np.int32)


def _says(what: str, good: bool, detail: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'}  {what:<40} {detail}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
