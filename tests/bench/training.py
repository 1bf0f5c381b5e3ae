"""What each technique of training is worth: time and memory with it and without it.

    python -m tests.bench.training [--cache DIR] [--turns 10] [--only NAME] [--json]

Each pair is measured in one process, in turns of a few steps, so that both meet the same load. `ms` is CPU time per
step of 256 events, `wait` the share of the time spent waiting for data. `saved` is what one batch keeps for the
backward pass, `gradients` what it leaves, `state` what the optimisers hold. Pairs marked `large` are of a synthetic
log with 200,000 users and 100,000 items, all others of MovieLens-100K. AUC: `tests.bench.training_auc`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from edge_ranker.loader import Loader
from edge_ranker.loader import Sequence as Batches
from edge_ranker.samples import Batch
from edge_ranker.tables import Tables
from feature_service.dataset import Dataset, ItemFacts
from feature_service.load import load_dataset
from infra.clock import SystemClock
from reranker.amp import choose_precision, has_bf16
from reranker.descent import PARTS, Descent
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.source import LogInMemory
from reranker.train import schema_for

STEPS_PER_TURN = 8
EVENTS_PER_STEP = 256
OFF = replace(Recipe(), amp="off")
# name -> (log, recipes by side)
PAIRS: dict[str, tuple[str, dict[str, Recipe]]] = {
    "pooled histories": (
        "movielens",
        {"EmbeddingBag": OFF, "Embedding + mean": replace(OFF, pooling="mean")},
    ),
    "tables with sparse gradients": (
        "large",
        {"sparse": OFF, "dense": replace(OFF, sparse="none")},
    ),
    "half precision, batch 128": (
        "movielens",
        {"bf16": replace(OFF, amp="on"), "fp32": OFF},
    ),
    "half precision, batch 512": (
        "movielens",
        {"bf16": replace(OFF, amp="on", batch_size=512), "fp32": replace(OFF, batch_size=512)},
    ),
    "gradient accumulation": (
        "movielens",
        {"4 x 32": replace(OFF, batch_size=32, accumulate=4), "1 x 128": OFF},
    ),
    "loader": (
        "movielens",
        {"1 worker": replace(OFF, workers=1), "no worker": OFF},
    ),
    "loader, 2 workers": (
        "movielens",
        {"2 workers": replace(OFF, workers=2), "no worker": OFF},
    ),
}


class Side:
    """One side of a pair under way."""

    def __init__(self, log: LogInMemory, recipe: Recipe, stack: ExitStack, n_steps: int) -> None:
        torch.manual_seed(0)
        schema = schema_for(log.n_users(), log.known)
        self.recipe = recipe
        self.rankers = Rankers(
            Tables(schema, log.fitted(), sparse=recipe.sparse_tables()), pooling=recipe.pooling
        ).train()
        samples = log.samples(schema, recipe, np.random.default_rng(0))
        self.descent = stack.enter_context(Descent(self.rankers, recipe, choose_precision(recipe, bf16=has_bf16())))
        self.group = PARTS * recipe.accumulate
        self.steps = EVENTS_PER_STEP // (self.group * recipe.batch_size) or 1
        per_pass = samples.n_batches
        self.loader = stack.enter_context(
            Loader(
                Batches(samples, per_pass=per_pass, first=0, last=10**9),
                workers=recipe.workers,
                prefetch=recipe.prefetch,
                device=torch.device("cpu"),
                clock=SystemClock(),
            )
        )
        self.one: Batch = next(samples.batches(0, 0, 1, 1))
        self.cpu_s = self.wall_s = 0.0
        self.n_events = 0

    def turn(self, steps: int, *, counted: bool) -> None:
        """A few steps."""
        begun_s, begun_cpu_s, waited_s = time.monotonic(), time.process_time(), self.loader.wait_s
        for _ in range(steps):
            self.descent.step(self.loader.take(self.group), 1e-3)
        if counted:
            self.wall_s += time.monotonic() - begun_s
            self.cpu_s += time.process_time() - begun_cpu_s
            self.n_events += steps * self.group * self.recipe.batch_size
        else:
            self.loader.wait_s = waited_s

    def memory(self) -> dict[str, float]:
        """MB: the most that the gradients of one batch take on their way, what they are in the end, and what the
        optimisers hold."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            # In this thread: the profiler does not follow into those of the descent.
            _, gradients = self.descent._of_one(self.one)
        events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        left = sum(_bytes(g) for g in gradients if g is not None)
        return {
            "peak": round(max(np.cumsum(changes)) / 1e6, 1),
            "gradients": round(left / 1e6, 2),
            "state": round(self.descent.state_bytes() / 1e6, 2),
        }


def measure(pair: dict[str, Recipe], log: LogInMemory, turns: int) -> dict[str, dict[str, float]]:
    """Both sides of a pair, in turns."""
    with ExitStack() as stack:
        sides = {name: Side(log, recipe, stack, turns * STEPS_PER_TURN) for name, recipe in pair.items()}
        for number in range(turns + 1):
            for side in sides.values():
                side.turn(STEPS_PER_TURN, counted=number > 0)
        return {
            name: {
                "ms": round(1e3 * side.cpu_s * EVENTS_PER_STEP / side.n_events, 1),
                "wall ms": round(1e3 * side.wall_s * EVENTS_PER_STEP / side.n_events, 1),
                "wait": round(side.loader.wait_s / side.wall_s, 3),
                **side.memory(),
            }
            for name, side in sides.items()
        }


def large_log(n_users: int = 200_000, n_items: int = 100_000, n_events: int = 600_000) -> Dataset:
    """Tables large enough for sparse gradients; nothing to learn."""
    rng = np.random.default_rng(0)
    user = np.sort(np.concatenate((np.arange(n_users), rng.integers(0, n_users, n_events - n_users))))
    first = np.searchsorted(user, np.arange(n_users + 1))
    ts_us = (
        1_700_000_000_000_000 + (np.arange(n_events) - first[user]) * 3_600_000_000 + rng.integers(0, 10**9, n_events)
    )
    item = np.concatenate((np.arange(n_items), rng.integers(0, n_items, n_events - n_items)))
    return Dataset(
        name="large",
        user_ids=[str(u) for u in range(n_users)],
        item_ids=[str(i) for i in range(n_items)],
        facts=[ItemFacts("", (f"c{i % 20}",)) for i in range(n_items)],
        attributes=[{}] * n_users,
        events=("click",),
        fingerprint="large",
        user=user,
        item=rng.permutation(item),
        ts_us=ts_us,
        first=first,
    )


def _bytes(gradient: torch.Tensor) -> int:
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


def _print(rows: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    columns = list(rows[0][2])
    print("| | | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    for name, side, numbers in rows:
        print(f"| {name} | {side} | " + " | ".join(str(numbers.get(c, "")) for c in columns) + " |", flush=True)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".trirank/cache"))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", choices=list(PAIRS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    movielens = LogInMemory(load_dataset("movielens-100k", asked.cache))
    rows = []
    for name, (log, pair) in PAIRS.items():
        if asked.only in (None, name) and asked.turns:
            found = measure(pair, LogInMemory(large_log()) if log == "large" else movielens, asked.turns)
            rows += [(f"{name} ({log})" if log == "large" else name, side, numbers) for side, numbers in found.items()]
    if asked.json:
        print(json.dumps({"load": os.getloadavg()[0], "steps": rows}, indent=2))
        return
    print(f"load {os.getloadavg()[0]:.1f}")
    if rows:
        _print(rows)


if __name__ == "__main__":
    main()
