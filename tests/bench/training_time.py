"""How long `trirank train` takes on this machine for both rankers, as it is and with every technique on.

    python -m tests.bench.training_time [--home DIR] [--seed 7] [--only defaults|all-on] [--json]

Runs the real command in a process of its own, one after the other. `fit` is wall time from reading the log to the last
pass; `whole` also tests, exports, calibrates and packages. `CPU` is user and system time of the whole command, its
workers included; `others` the cores that all other processes used meanwhile, on average: times count where that is
about 0. Ends with status 1 when an AUC misses its target. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infra.release import read_release

# The recipe of `tests.bench.training_auc.ALL_ON`: EmbeddingBag, a sparse optimiser for the table that can have one,
# bf16, accumulated gradients, a worker that makes batches, early stop.
ALL_ON = (
    "--pooling", "bag", "--sparse", "user", "--amp", "on", "--batch-size", "256", "--accumulate", "2",
    "--workers", "1", "--patience", "1",
)  # fmt: skip
RUNS: dict[str, tuple[tuple[str, ...], float]] = {"defaults": ((), 120.0), "all-on": (ALL_ON, 90.0)}
TARGETS = {
    "edge": {"uniform": 0.90, "popularity": 0.82},
    "rerank": {"uniform": 0.92, "popularity": 0.86},
}


def main() -> int:
    """Print the table, or JSON; the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--home", type=Path, default=Path(".trirank"), help="folder of the download cache")
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--only", choices=RUNS)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    found = {name: measure(name, given.home, given.seed) for name in RUNS if given.only in (None, name)}
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("| | fit, s (wanted) | whole, s | CPU, s | others, cores | edge, uniform / popular | BST |")
        print("|---|---|---|---|---|---|---|")
        for name, run in found.items():
            aucs = [" / ".join(f"{auc:.4f}" for auc in of.values()) for of in run["auc"].values()]
            print(
                f"| {name} | {run['fit_s']:.0f} ({run['wanted_s']:.0f}) | {run['whole_s']:.0f} | {run['cpu_s']:.0f} "
                f"| {run['others_cores']:.2f} | {aucs[0]} | {aucs[1]} |"
            )
    return 1 if any(run["missed"] for run in found.values()) else 0


def measure(name: str, home: Path, seed: int) -> dict[str, Any]:
    """One training."""
    flags, wanted_s = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        train = [sys.executable, "-m", "infra.cli", "train", "--data", "movielens-100k"]
        command = [*train, "--out", str(out), "--home", str(home), "--seed", str(seed), *flags]
        before, busy_s, begun_s = os.times(), machine_busy_s(), time.monotonic()
        subprocess.run(command, check=True, stdout=sys.stderr)
        whole_s, after, busy_s = time.monotonic() - begun_s, os.times(), machine_busy_s() - busy_s
        report = read_release(out).manifest.report
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    auc = {m: {k: report["models"][m][k]["auc"] for k in kinds} for m, kinds in TARGETS.items()}
    missed = [f"{m}, {k}" for m, kinds in TARGETS.items() for k, least in kinds.items() if auc[m][k] < least]
    return {
        "fit_s": report["seconds"]["training"],
        "wanted_s": wanted_s,
        "whole_s": round(whole_s, 1),
        "cpu_s": round(cpu_s, 1),
        "others_cores": round((busy_s - cpu_s) / whole_s, 2),
        "passes": len(report["passes"]),
        "auc": auc,
        "missed": missed,
    }


def machine_busy_s() -> float:
    """Seconds that all cores together have worked since the machine started."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
