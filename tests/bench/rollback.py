"""`python -m tests.bench.rollback --release DIR`: how soon a running stack takes a bad release back by itself.

At 50 requests/s of the candidate release: a reranker that returns NaN, one that is killed again and again, and one that
stands still every now and then, so that the p99 doubles and the median stays. The first has to be over within 10 s, the
second within 10 s, the last within 60 s. Ends with status 1 when one is not, or when a request fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.directory import read_directory
from infra.release import read_release
from tests.bench.gray_load import Operator, Paced, quantile_ms
from tests.derived_release import derived_release
from tests.running_stack import RunningStack
from tests.support import eventually

RATE = 100.0  # half of it is the candidate release's
GOOD_S = 30.0
FAULTS = (("nan", 10.0), ("killed", 10.0), ("slow", 60.0))

Fault = Callable[[threading.Event], None]


def main() -> int:
    """Run every fault and print the seconds."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.rollback", description=__doc__)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--good-s", type=float, default=GOOD_S, help="seconds the release is good before the fault")
    options.add_argument("--faults", default="nan,killed,slow")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trirank-rollback-", ignore_cleanup_errors=True) as folder:
        stack = RunningStack(given.release, Path(folder) / "home").start()
        try:
            bench = _Bench(stack, given.release, Path(folder), given.good_s)
            asked = given.faults.split(",")
            good = [bench.measure(name, limit_s) for name, limit_s in FAULTS if name in asked]
            return 0 if all(good) else 1
        finally:
            stack.stop()


class _Bench:
    def __init__(self, stack: RunningStack, release: Path, folder: Path, good_s: float) -> None:
        self._stack = stack
        self._operator = Operator(stack)
        self._stable = read_release(release)
        self._folder = folder
        self._good_s = good_s

    def measure(self, fault: str, limit_s: float) -> bool:
        """One gray release with one fault; whether it was taken back in time."""
        broken = fault == "nan"
        other = derived_release(self._stable, self._folder / f"with-{fault}", broken=broken)
        name, stopping = f"g-{fault}", threading.Event()
        with Paced(self._stack.url, RATE).flowing() as load:
            self._operator.start(_plan(name, self._stable.manifest.name, other.manifest.name, other.path))
            began_s = time.monotonic()
            if not broken:
                stopping.wait(self._good_s)
                assert self._operator.now()["state"] == "running", self._operator.now()["reason"]
                before = load.between(began_s, time.monotonic())
                p50, p99 = (quantile_ms([a for a in before if a.arm == "candidate"], q) for q in (0.5, 0.99))
                print(f"      before: candidate release p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)
                worker = threading.Thread(target=self._fault(fault, other.manifest.name, p99), args=(stopping,))
                began_s = time.monotonic()
                worker.start()
            try:
                eventually(lambda: self._operator.now()["state"] == "aborted", timeout_s=3 * limit_s, every_s=0.1)
                took_s = time.monotonic() - began_s
            except AssertionError:
                took_s = float("inf")
            finally:
                stopping.set()
                if not broken:
                    worker.join()
            during = load.between(began_s, time.monotonic())
            mine = [asked for asked in during if asked.arm == "candidate"]
            self._operator.end(name)
        failed = sum(asked.status != 200 for asked in load.asked)
        reason = self._operator.now()["reason"]
        good = took_s <= limit_s and not failed
        rate = len(mine) / min(took_s, 3 * limit_s)
        print(f"{'ok   ' if good else 'FAILS'} {fault}: taken back after {took_s:.1f} s (allowed {limit_s:.0f}), at "
              f"{rate:.0f} candidate requests/s; {failed} of {len(load.asked)} requests failed; p99 then "
              f"{quantile_ms(mine, 0.99):.1f} ms\n      {reason}", flush=True)  # fmt: skip
        return good

    def _fault(self, fault: str, release: str, p99_ms: float) -> Fault:
        state = self._stack.state()

        def rerankers() -> list[int]:
            found = read_directory(state["redis"], state["stack"])
            return [entry.pid for entry in found if entry.role == "rerank" and entry.release == release]

        def kill(stopping: threading.Event) -> None:
            while not stopping.wait(0.1):
                for pid in rerankers():
                    _signal(pid, signal.SIGKILL)

        def stand_still(stopping: threading.Event) -> None:
            # Twice the p99 long and 5 % of the time, so that more than 2 of 100 requests take twice the p99.
            still_s = 2.0 * p99_ms / 1e3
            pids = rerankers()
            while not stopping.wait(19 * still_s):
                for pid in pids:
                    _signal(pid, signal.SIGSTOP)
                stopping.wait(still_s)
                for pid in pids:
                    _signal(pid, signal.SIGCONT)

        return kill if fault == "killed" else stand_still


def _plan(name: str, stable: str, candidate: str, path: Path) -> dict[str, Any]:
    return {
        "name": name, "stable": stable, "candidate": candidate, "path": str(path),
        "steps": [{"weight_ppm": 500_000, "hold_s": 3600}],
    }  # fmt: skip


def _signal(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
