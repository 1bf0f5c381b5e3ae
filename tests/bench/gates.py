"""`python -m tests.bench.gates`: the gates on simulated releases: how often they are wrong, how soon they are right.

Everything goes through the product's own functions; only the requests are drawn at random. Ends with status 1 when a
figure is not as said.
"""

from __future__ import annotations

import argparse
import math
import sys
from statistics import NormalDist

import numpy as np

from reranker.gray.decide import Decision, decide
from reranker.gray.measures import Figures
from reranker.gray.plan import HARD_GATES, Gate, Plan, Step
from reranker.gray.readings import RECENT_S, Readings, Window
from reranker.gray.sequential import rate_is_lower, threshold
from reranker.gray.state import GrayRelease, change

ALPHA, POWER, BASE, DROP = 0.005, 0.8, 0.10, 0.20
# Latencies: normal over the buckets, which are 5 % apart: median 3 ms, p99 7 ms.
BUCKETS = np.arange(40, 150)
LATENCY = np.exp(-0.5 * ((BUCKETS - 70) / 7.2) ** 2)
LATENCY /= LATENCY.sum()
P99 = 87
LOOK_S = 5.0
LONGEST_S = 1800.0
CLICKS = Gate(metric="click_through", kind="non_inferiority", limit=DROP, alpha=ALPHA)
PLAN = Plan(
    name="sim", stable="a", candidate="b", path="/b", gates=(*HARD_GATES, CLICKS), auto_promote=True,
    steps=tuple(Step(weight_ppm=w, hold_s=120, min_samples=200) for w in (10_000, 50_000, 250_000, 500_000)),
)  # fmt: skip


def main() -> int:
    """Print each figure and what it has to be; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.gates", description=__doc__)
    options.add_argument("--releases", type=int, default=2000)
    n = options.parse_args().releases
    rng = np.random.default_rng(1)
    good = [_rate_in_a_a(rng, n), _drop_is_found(rng, n), _a_a_releases(rng, n)]
    good += [_found_within(rng, what, limit_s, **fault) for what, limit_s, fault in FAULTS]
    return 0 if all(good) else 1


def fixed_size() -> int:
    """Impressions per arm of the fixed-size test with the same alpha (one-sided), power, base rate and drop."""
    z, low = NormalDist().inv_cdf, BASE * (1 - DROP)
    pooled = (BASE + low) / 2
    spread = z(1 - ALPHA) * math.sqrt(2 * pooled * (1 - pooled))
    spread += z(POWER) * math.sqrt(BASE * (1 - BASE) + low * (1 - low))
    return math.ceil((spread / (BASE - low)) ** 2)


def _first_verdicts(rng: np.random.Generator, rate: float, n: int, each: int, looks: int) -> np.ndarray:
    """Impressions per arm at the first verdict of `n` releases that are looked at after every `each`; 0 for none."""
    mine = rng.binomial(each, rate, (n, looks)).cumsum(1).tolist()
    base = rng.binomial(each, BASE, (n, looks)).cumsum(1).tolist()
    needed = threshold(ALPHA)
    found = np.zeros(n, np.int64)
    for i in range(n):
        for look, (x, x_base) in enumerate(zip(mine[i], base[i], strict=True), start=1):
            if rate_is_lower(x, look * each, x_base, look * each, effect=DROP) >= needed:
                found[i] = look * each
                break
    return found


def _rate_in_a_a(rng: np.random.Generator, n: int) -> bool:
    found = _first_verdicts(rng, BASE, n, 20, 2000)
    share = float(np.mean(found > 0))
    return _says("click-through, A/A: false verdicts <= 1 %", share <= 0.01, f"{share:.2%}, {n} x 2,000 looks")


def _drop_is_found(rng: np.random.Generator, n: int) -> bool:
    fixed = fixed_size()
    found = _first_verdicts(rng, BASE * (1 - DROP), n, 20, 6 * fixed // 20)
    detected = found > 0
    power = float(np.mean(detected & (found <= 1.3 * fixed)))
    detail = (
        f"{power:.1%} by 1.3 x {fixed:,} impressions per arm (fixed-size: {POWER:.0%} at 1 x); "
        f"median {np.median(found[detected]) / fixed:.2f} x, mean {found[detected].mean() / fixed:.2f} x"
    )
    return _says("click-through -20 %: as much power by 1.3 x", power >= POWER, detail)


def _a_a_releases(rng: np.random.Generator, n: int) -> bool:
    ends = [simulate(rng) for _ in range(n)]
    aborted = [decision.sentence for decision, _, _ in ends if decision.act == "abort"]
    promoted = [(least, took_s) for decision, least, took_s in ends if decision.act == "promote"]
    too_soon = sum(least < 200 for least, _ in promoted)
    took = f"median {np.median([took_s for _, took_s in promoted]):.0f} s" if promoted else "-"
    detail = f"{len(aborted)} of {n}; {len(promoted)} promoted ({took}), {too_soon} of them without the samples"
    for sentence in aborted[:5]:
        print(f"      aborted: {sentence}")
    return _says("A/A releases, all gates: false aborts <= 1 %", len(aborted) <= 0.01 * n and not too_soon, detail)


FAULTS = (
    ("every request degraded (NaN, dead replica)", 10.0, {"degraded": 1.0}),
    ("1 request in 10 degraded", 60.0, {"degraded": 0.1}),
    ("p99 doubled, p50 the same", 60.0, {"tail": 0.03}),
)


def _found_within(rng: np.random.Generator, what: str, limit_s: float, **fault: float) -> bool:
    """The fault begins after five good minutes at 50 requests/s of the candidate release."""
    took = []
    for _ in range(100):
        decision, _, took_s = simulate(rng, per_s=200.0, start_step=2, look_s=1.0, fault_after_s=300.0, **fault)
        took.append(took_s - 300.0 if decision.act == "abort" else float("inf"))
    return _says(
        f"{what}: abort <= {limit_s:.0f} s",
        max(took) <= limit_s,
        f"median {np.median(took):.0f} s, worst {max(took):.0f} s",
    )


def simulate(
    rng: np.random.Generator,
    *,
    per_s: float = 1000.0,
    start_step: int = 0,
    look_s: float = LOOK_S,
    fault_after_s: float = float("inf"),
    degraded: float = 0.0,
    tail: float = 0.0,
) -> tuple[Decision, int, float]:
    """One release until it is aborted, promoted or too old: (last decision, least samples of a step, seconds).

    Faults of the candidate release: so many more are degraded, or take twice the 99th percentile.
    """
    release = GrayRelease(plan=PLAN if start_step == 0 else _held(PLAN))
    release = change(release, "start", at_us=0, why="")
    for _ in range(start_step):
        release = change(release, "step", at_us=0, why="", verdict="healthy")
    sums = [np.zeros((2, len(FIELDS) + BUCKETS.size), np.int64)]
    began, least = 0, 10**9
    while True:
        now_s = len(sums) * look_s
        faulty = now_s > fault_after_s
        requests = rng.poisson(per_s * release.weight_ppm / 1e6 * look_s, 2)
        mine = _drawn(rng, int(requests[0]), degraded * faulty, tail * faulty)
        sums.append(sums[-1] + np.stack((mine, _drawn(rng, int(requests[1]), 0.0, 0.0))))
        starts = [max(0, len(sums) - 1 - round(s / look_s)) for s in RECENT_S]
        *recent, step, total = (_window(sums[-1] - sums[start]) for start in (*starts, began, 0))
        readings = Readings(tuple(recent), step, total)
        decision = decide(release, readings, int(now_s * 1e6))
        least_now = min(least, int((sums[-1] - sums[began])[:, 0].min()))
        if decision.act == "step":
            release = change(release, "step", at_us=int(now_s * 1e6), why="", verdict=decision.verdict)
            began, least = len(sums) - 1, least_now
        elif decision.act != "hold" or now_s >= LONGEST_S:
            return decision, least_now, now_s


FIELDS = ("requests", "errors", "deadline_misses", "degraded", "units", "impressions", "clicks")


def _drawn(rng: np.random.Generator, n: int, degraded: float, tail: float) -> np.ndarray:
    shown = 20 * n
    shares = LATENCY * (1 - tail)
    shares[P99 + 15 - BUCKETS[0]] += tail
    errors, missed, without, clicks = rng.binomial([n, n, n, shown], [0.001, 0.005, min(1.0, 0.005 + degraded), BASE])
    return np.concatenate(([n, errors, missed, without, n, shown, clicks], rng.multinomial(n, shares)))


def _window(counts: np.ndarray) -> Window:
    mine, base = (_figures(row) for row in counts)
    return Window(mine, mine, base)


def _figures(row: np.ndarray) -> Figures:
    *counts, clicks = row[: len(FIELDS)].tolist()
    latency = row[len(FIELDS) :]
    at = np.flatnonzero(latency)
    return Figures(
        **dict(zip(FIELDS[:-1], counts, strict=True)),
        events={"click": clicks},
        latency=dict(zip(BUCKETS[at].tolist(), latency[at].tolist(), strict=True)),
    )


def _held(plan: Plan) -> Plan:
    """The plan with steps that are held longer than the simulation runs."""
    steps = tuple(Step(weight_ppm=step.weight_ppm, hold_s=10 * LONGEST_S) for step in plan.steps)
    return Plan(
        name=plan.name, stable=plan.stable, candidate=plan.candidate, path=plan.path, gates=plan.gates, steps=steps
    )


def _says(what: str, good: bool, detail: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'}  {what:<52} {detail}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
