"""How long engines take, beside each other in one run; and what they change in an order. No clock but the machine's.

Engines take turns of a few runs, so that whatever else the machine does hits all of them alike: ratios hold on a busy
machine, absolute times are upper bounds. The first run of a turn is not counted: it would pay for the caches that the
engine before has filled. Refuses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

WARM_RUNS = 3
RUNS_PER_TURN = 5
LEAST_TURNS = 4
DEPTH = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one engine at one shape: wall time of a run, time of the calling thread on a core, requests a second."""

    p50_ms: float
    p95_ms: float
    cpu_p50_ms: float
    requests_per_s: float
    runs: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Scores of an engine beside the recorded FP32 ones, over requests. `auc_change_pct` is relative; it and `auc` are
    None when no request says which candidate was taken."""

    auc: float | None
    auc_change_pct: float | None
    overlap_at_20: float
    logit_rmse: float


def take_turns(runs: Mapping[str, Callable[[], object]], seconds: float, n_requests: int) -> dict[str, Timing]:
    """Run all in turn for `seconds`, at least `LEAST_TURNS` turns; one run answers `n_requests`."""
    for run in runs.values():
        for _ in range(WARM_RUNS):
            run()
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    end_s, turns = time.perf_counter() + seconds, 0
    while turns < LEAST_TURNS or time.perf_counter() < end_s:
        for name, run in runs.items():
            run()
            for _ in range(RUNS_PER_TURN):
                began_s, began_cpu_s = time.perf_counter(), time.thread_time()
                run()
                cpu[name].append(time.thread_time() - began_cpu_s)
                wall[name].append(time.perf_counter() - began_s)
        turns += 1
    return {name: _timing(wall[name], cpu[name], n_requests) for name in runs}


def agreement(recorded: Sequence[F32], served: Sequence[F32], taken: Sequence[int | None]) -> Agreement:
    """Compare the logits of each request; `taken` is the place of the candidate that was taken."""
    difference = np.concatenate(served) - np.concatenate(recorded)
    overlaps = [_overlap(one, other) for one, other in zip(recorded, served, strict=True)]
    before, after = auc(recorded, taken), auc(served, taken)
    changed = None if before is None or after is None else 100.0 * (after - before) / before
    return Agreement(after, changed, float(np.mean(overlaps)), float(np.sqrt(np.mean(np.square(difference)))))


def auc(logits: Sequence[F32], taken: Sequence[int | None]) -> float | None:
    """Mean over requests of the share of the other candidates that score below the taken one; ties count half."""
    shares = []
    for scores, place in zip(logits, taken, strict=True):
        if place is not None and scores.size > 1:
            others = np.delete(scores, place)
            shares.append(np.mean(others < scores[place]) + 0.5 * np.mean(others == scores[place]))
    return float(np.mean(shares)) if shares else None


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/status") as status:
            line = next((line for line in status if line.startswith("VmRSS:")), "VmRSS: 0 kB")
    except OSError:
        return 0
    return int(line.split()[1]) * 1024


def _overlap(one: F32, other: F32) -> float:
    depth = min(DEPTH, one.size)
    first, second = (set(np.argsort(-scores, kind="stable")[:depth].tolist()) for scores in (one, other))
    return len(first & second) / depth if depth else 1.0


def _timing(wall_s: Sequence[float], cpu_s: Sequence[float], n_requests: int) -> Timing:
    p50, p95 = np.percentile(wall_s, (50, 95)).tolist()
    return Timing(
        p50_ms=p50 * 1e3,
        p95_ms=p95 * 1e3,
        cpu_p50_ms=float(np.median(cpu_s)) * 1e3,
        requests_per_s=n_requests / p50,
        runs=len(wall_s),
    )
