"""`python -m tests.bench.shadow --release DIR`: what shadow traffic costs the answers, on a running stack.

Two gray releases take turns, one with a shadow of 10 % and one without; neither shows the candidate release to more
than one user in a million. Every pair of turns is one ratio of p99s and one of medians; printed are their medians.
Ends with status 1 when the p99 costs more than 2 %, or when a request fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from infra.release import read_release
from tests.bench.gray_load import Operator, Paced, quantile_ms
from tests.derived_release import derived_release
from tests.running_stack import RunningStack, http

SHARE_PPM = 100_000
ALLOWED = 1.02


def main() -> int:
    """Take turns and print the ratios."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.shadow", description=__doc__)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--turns", type=int, default=12, help="pairs of turns")
    options.add_argument("--seconds", type=float, default=10.0, help="of one turn")
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
    p50s: dict[int, list[float]] = {0: [], SHARE_PPM: []}
    p99s: dict[int, list[float]] = {0: [], SHARE_PPM: []}
    with Paced(stack.url, rate).flowing() as load:
        for turn in range(turns + 1):
            # The order changes, so that what drifts with time favours neither.
            for shadow in (0, SHARE_PPM) if turn % 2 else (SHARE_PPM, 0):
                name = f"s{turn}-{shadow}"
                steps = [{"weight_ppm": 1, "shadow_ppm": shadow, "hold_s": 3600}]
                operator.start({**plan, "name": name, "steps": steps})
                began_s = time.monotonic()
                waiting.wait(seconds)
                asked = load.between(began_s, time.monotonic() - 0.2)
                operator.end(name)
                if turn:  # the first pair brings the candidate release up and warms everything
                    p50s[shadow].append(quantile_ms(asked, 0.5))
                    p99s[shadow].append(quantile_ms(asked, 0.99))
    failed = sum(asked.status != 200 for asked in load.asked)
    lines = [line for line in http("GET", f"{stack.url}/metrics").body.splitlines() if "gateway_shadow_total{" in line]
    print(f"{len(load.asked)} requests at {rate:g}/s, {failed} failed; shadow: {'; '.join(lines)}")
    ratios = [on / off for on, off in zip(p99s[SHARE_PPM], p99s[0], strict=True)]
    middles = [on / off for on, off in zip(p50s[SHARE_PPM], p50s[0], strict=True)]
    spread = f"median {median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"p99 with a shadow of 10 %: {median(p99s[SHARE_PPM]):.2f} ms, without: {median(p99s[0]):.2f} ms; "
          f"ratio of the {turns} pairs: {spread}")  # fmt: skip
    print(f"p50 with: {median(p50s[SHARE_PPM]):.2f} ms, without {median(p50s[0]):.2f} ms; ratio: {median(middles):.3f}")
    return 0 if median(ratios) <= ALLOWED and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
