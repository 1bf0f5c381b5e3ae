"""What each technique of training, and each reranker, costs or brings in AUC: whole trainings, three seeds.

    python -m tests.bench.training_auc [--tables techniques architectures one-pass] [--seeds 7 8 9] [--results FILE]

Each variant is trained on MovieLens-100K with every seed and ranks the same test events, so that a difference to the
first variant of its table is a difference of the training alone. Printed are the median over the seeds and, behind it,
half the distance of the extremes. `CPU s` is user and system time of the fit, workers included. Results are kept in
--results, one line per training, and not computed again: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console

from edge_ranker.tables import Tables
from feature_service.load import load_dataset
from infra.clock import SystemClock
from reranker.amp import choose_precision, has_bf16
from reranker.architectures import rerank_architecture
from reranker.checkpoint import Checkpoints
from reranker.evaluate import quality_report, score_trial
from reranker.fitting import Fitting
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.source import LogInMemory
from reranker.train import schema_for

DEFAULTS = Recipe()
# Every technique of the trainer at once; `infra/docs/training.md` gives the command that trains a release so.
ALL_ON = replace(DEFAULTS, batch_size=256, accumulate=2, amp="on", sparse="user", pooling="bag", workers=1, patience=1)
# The test events of every training: drawn once, whatever the seed.
TEST_DRAW = 1000


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe and its passes (None: what the size of the log asks for)."""

    name: str
    recipe: Recipe = DEFAULTS
    passes: int | None = None


def _rerank(name: str, title: str, passes: int | None = None, **more: Any) -> Variant:
    return Variant(title, replace(DEFAULTS, rerank=rerank_architecture(name, **more)), passes)


# The first of each table is what the others are compared with.
TABLES: dict[str, tuple[Variant, ...]] = {
    "techniques": (
        Variant("defaults"),
        Variant("bf16", replace(DEFAULTS, amp="on")),
        Variant("accumulation, 4 x 32", replace(DEFAULTS, batch_size=32, accumulate=4)),
        Variant("`user` table sparse", replace(DEFAULTS, sparse="user")),
        Variant("Embedding + mean", replace(DEFAULTS, pooling="mean")),
        Variant("all on", ALL_ON),
        Variant("8 passes", passes=8),
        Variant("8 passes, patience 1", replace(DEFAULTS, patience=1), 8),
    ),
    "architectures": (Variant("defaults"), _rerank("din", "DIN")),
    "one-pass": (
        Variant("BST, one pass", passes=1),
        _rerank("din", "DIN, one pass", 1),
        _rerank("bst", "BST, mean read-out, one pass", 1, readout="mean"),
        _rerank("bst", "BST, concat read-out, one pass", 1, readout="concat"),
        _rerank("bst", "BST, two blocks, one pass", 1, blocks=2),
    ),
}
MEASURES = tuple((model, kind) for model in ("edge", "rerank") for kind in ("uniform", "popularity"))


@dataclass(frozen=True, slots=True)
class Result:
    """One training: its AUCs in the order of `MEASURES`, passes done, times of the fit, load when it ended."""

    variant: str
    recipe: dict[str, Any]
    seed: int
    aucs: list[float]
    passes: int
    wall_s: float
    cpu_s: float
    load: float


def train(variant: Variant, log: LogInMemory, seed: int) -> Result:
    """Train without making a release, and rank the common test events."""
    clock, rng, recipe = SystemClock(), np.random.default_rng(seed), variant.recipe.checked()
    torch.manual_seed(seed)
    tables = Tables(schema_for(log.n_users(), log.known), log.fitted(), sparse=recipe.sparse_tables())
    rankers = Rankers(tables, edge=recipe.edge, rerank=recipe.rerank, pooling=recipe.pooling)
    passes = variant.passes or recipe.passes(log.n_train)
    begun_s, begun_cpu_s = time.monotonic(), cpu_seconds()
    with tempfile.TemporaryDirectory() as draft:
        checkpoints = Checkpoints(Path(draft), {}, rng, every_s=float("inf"), clock=clock)
        quiet, precision = Console(file=io.StringIO()), choose_precision(recipe, bf16=has_bf16())
        done = Fitting(rankers, log, recipe, passes, rng, checkpoints, quiet, clock, precision).run()
    wall_s, cpu_s = time.monotonic() - begun_s, cpu_seconds() - begun_cpu_s
    timeline, trial = log.test(np.random.default_rng(TEST_DRAW))
    report = quality_report(score_trial(rankers, timeline, trial), timeline, trial, 2.0 * recipe.negatives_per_kind)
    aucs = [_number(report[model][kind]["auc"]) for model, kind in MEASURES]
    return Result(
        variant.name, asdict(recipe), seed, aucs, len(done), round(wall_s, 1), round(cpu_s, 1), os.getloadavg()[0]
    )


def cpu_seconds() -> float:
    """User and system time of this process and of the workers it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def print_table(results: Sequence[Result]) -> None:
    """One line per variant, compared with the first."""
    variants = list(dict.fromkeys(r.variant for r in results))
    of = {name: {r.seed: r for r in results if r.variant == name} for name in variants}
    base = of[variants[0]]
    print("| | edge, uniform | popular | reranker, uniform | popular | largest loss | passes | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in variants:
        seeds = of[name]
        cells = [_spread([r.aucs[m] for r in seeds.values()]) for m in range(len(MEASURES))]
        losses = [base[s].aucs[m] - r.aucs[m] for s, r in seeds.items() if s in base for m in range(len(MEASURES))]
        passes = "/".join(str(r.passes) for r in seeds.values())
        cpu_s = median(r.cpu_s for r in seeds.values())
        worst = "" if name == variants[0] or not losses else f"{max(losses):+.4f}"
        print(f"| {name} | " + " | ".join(cells) + f" | {worst} | {passes} | {cpu_s:.0f} |")


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.4f} ±{(max(values) - min(values)) / 2:.4f}"


def _number(value: float | None) -> float:
    if value is None:
        raise ValueError("the test events allow no AUC")
    return value


def _kept(file: Path | None) -> list[Result]:
    if file is None or not file.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in file.read_bytes().splitlines()]


def main() -> int:
    """Train what is asked for and print the tables; the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options.add_argument("--seeds", nargs="+", type=int, default=[7, 8, 9])
    options.add_argument("--cache", type=Path, default=Path(".trirank/cache"))
    options.add_argument("--results", type=Path, help="file that keeps each training's result")
    given = options.parse_args()
    torch.set_num_threads(1)
    log = LogInMemory(load_dataset("movielens-100k", given.cache))
    kept = {(r.variant, r.seed): r for r in _kept(given.results)}
    # Seed by seed: when it is interrupted, each table is whole for fewer seeds.
    for seed in given.seeds:
        for variant in dict.fromkeys(v for table in given.tables for v in TABLES[table]):
            found = kept.get((variant.name, seed))
            if found is not None and found.recipe == json.loads(json.dumps(asdict(variant.recipe))):
                continue
            result = kept[variant.name, seed] = train(variant, log, seed)
            print(result, file=sys.stderr, flush=True)
            if given.results is not None:
                with given.results.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    for table in given.tables:
        print(f"\n{table}: seeds {' '.join(map(str, given.seeds))}, load {os.getloadavg()[0]:.1f}\n")
        print_table([kept[v.name, seed] for v in TABLES[table] for seed in given.seeds])
    return 0


if __name__ == "__main__":
    sys.exit(main())
