"""`python -m tests.bench.shadow --release DIR`: what shadow traffic costs the answers, on a running stack.

Two gray releases take turns, one with a shadow of 10 % and one without; neither shows the candidate release to more
than one user in a million. All turns of a kind are taken together; the interval is of 1,000 draws of whole pairs of
turns, with replacement. Ends with status 1 when the p99 costs more than 2 %, or when a request fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from infra.release import read_release
from tests.bench.gray_load import Asked, Operator, Paced, quantile_ms
from tests.derived_release import derived_release
from tests.running_stack import RunningStack, http

SHARE_PPM = 100_000
ALLOWED = 1.02
DRAWS = 1000


def main() -> int:
    """Take turns and print the ratios."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.shadow", description=__doc__)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--turns", type=int, default=60, help="pairs of turns")
    options.add_argument("--seconds", type=float, default=3.0, help="of one turn")
    options.add_argument("--rate", type=float, default=60.0, help="requests a second")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trirank-shadow-", ignore_cleanup_errors=True) as folder:
        release = read_release(given.release)
        good = derived_release(release, Path(folder) / "good")
        stack = RunningStack(given.release, Path(folder) / "home").start()
        try:
            plan = {"stable": release.manifest.name, "candidate": "good", "path": str(good.path), "gates": []}
            return _measure(stack, plan, given.turns, given.seconds, given.rate)
        finally:
            stack.stop()


def _measure(stack: RunningStack, plan: dict[str, Any], turns: int, seconds: float, rate: float) -> int:
    operator, waiting = Operator(stack), threading.Event()
    pairs: list[dict[int, list[Asked]]] = []
    with Paced(stack.url, rate).flowing() as load:
        for turn in range(turns + 1):
            found: dict[int, list[Asked]] = {}
            # The order changes, so that what drifts with time favours neither.
            for shadow in (0, SHARE_PPM) if turn % 2 else (SHARE_PPM, 0):
                name = f"s{turn}-{shadow}"
                steps = [{"weight_ppm": 1, "shadow_ppm": shadow, "hold_s": 3600}]
                operator.start({**plan, "name": name, "steps": steps})
                began_s = time.monotonic()
                waiting.wait(seconds)
                found[shadow] = load.between(began_s, time.monotonic() - 0.2)
                operator.end(name)
            if turn:  # the first pair brings the candidate release up and warms everything
                pairs.append(found)
    failed = sum(asked.status != 200 for asked in load.asked)
    lines = [line for line in http("GET", f"{stack.url}/metrics").body.splitlines() if "gateway_shadow_total{" in line]
    print(f"{len(load.asked)} requests at {rate:g}/s, {failed} failed; shadow: {'; '.join(lines)}")
    good = not failed
    for q in (0.5, 0.99):
        on, off = _quantile(pairs, SHARE_PPM, q), _quantile(pairs, 0, q)
        rng = np.random.default_rng(1)
        drawn = [[pairs[at] for at in rng.integers(0, turns, turns)] for _ in range(DRAWS)]
        low, high = np.quantile([_quantile(some, SHARE_PPM, q) / _quantile(some, 0, q) for some in drawn], (0.05, 0.95))
        print(f"p{100 * q:.0f} with a shadow of 10 %: {on:.2f} ms, without: {off:.2f} ms; ratio {on / off:.3f} "
              f"(9 of 10 draws between {low:.3f} and {high:.3f})")  # fmt: skip
        good = good and (q != 0.99 or on / off <= ALLOWED)
    return 0 if good else 1


def _quantile(pairs: list[dict[int, list[Asked]]], shadow: int, q: float) -> float:
    return quantile_ms([asked for found in pairs for asked in found[shadow]], q)


if __name__ == "__main__":
    sys.exit(main())
