"""Training from a log larger than memory: resident memory, and its rate beside the same log in memory.

    python -m tests.bench.stream_training --events 20000000 [--steps 1000] [--buffer-events N] [--folder DIR] [--json]

Writes a synthetic log to Parquet (once per folder), then, each in a process of its own:
`streamed`  reads and spills it, fits a bounded number of steps, ranks the test events and writes a release: memory.
`rates`     fits the same rankers in turns of 50 steps from the stream and from memory: events per second of both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

EVENTS_PER_FILE = 1_000_000
EVENTS_PER_USER = 50
EVENTS_PER_ITEM = 200
TURN = 50


def write_log(folder: Path, n_events: int, seed: int = 0) -> None:
    """A log in the order of time; users like one of 50 kinds of items, popularity falls with the item's number."""
    import polars as pl

    done = folder / f".{n_events}.complete"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    n_users, n_items = max(n_events // EVENTS_PER_USER, 100), max(n_events // EVENTS_PER_ITEM, 1000)
    for number, begin in enumerate(range(0, n_events, EVENTS_PER_FILE)):
        n = min(EVENTS_PER_FILE, n_events - begin)
        user = rng.integers(0, n_users, n)
        item = (n_items * rng.random(n) ** 2).astype(np.int64) // 50 * 50 + np.where(
            rng.random(n) < 0.7, user % 50, rng.integers(0, 50, n)
        )
        ts = 1_700_000_000 + np.sort(rng.integers(begin, begin + n, n))
        frame = pl.DataFrame({"user_id": user, "item_id": item % n_items, "ts": ts})
        frame.with_columns(event=pl.lit("click")).write_parquet(folder / f"interactions-{number:04d}.parquet")
    done.touch()


def streamed(folder: Path, steps: int, buffer_events: int, seed: int = 0) -> dict[str, float]:
    """Memory and times of a streamed training with a bounded number of steps."""
    from infra.clock import SystemClock
    from reranker.descent import PARTS
    from reranker.evaluate import score_trial
    from reranker.fit import fit
    from reranker.package import package_release
    from reranker.report import quality, split_report

    begun_s = time.monotonic()
    log, rankers, recipe, rng = _prepared(folder, buffer_events, seed)
    spilled_s = time.monotonic() - begun_s
    source = Bounded(log.samples(rankers.tables.schema, recipe, rng), PARTS * steps)
    begun_s = time.monotonic()
    fit(rankers, source, recipe, passes=1, validate=lambda: float("nan"), on_step=lambda: None)
    fitted_s, fitted_rss = time.monotonic() - begun_s, _rss_mb()
    timeline, trial = log.test(rng)
    scores = score_trial(rankers, timeline, trial)
    report = {**quality(scores, rankers, timeline, trial, recipe), "split": split_report(log, timeline, trial)}
    with tempfile.TemporaryDirectory() as out:
        package_release(
            rankers,
            timeline,
            trial,
            report,
            Path(out) / "release",
            log=log,
            name="bench",
            rng=rng,
            clock=SystemClock(),
            log_loss_negatives=2.0 * recipe.negatives_per_kind,
        )
    return {
        "events": log.n_train,
        "users": len(log.known.user_ids),
        "items": len(log.known.item_ids),
        "spill_s": round(spilled_s, 1),
        "steps": steps,
        "fit_s": round(fitted_s, 1),
        "rss_after_fit_mb": fitted_rss,
        "rss_with_release_mb": _rss_mb(),
    }


def rates(folder: Path, steps: int, buffer_events: int, seed: int = 0) -> dict[str, float]:
    """Events per second from the stream and from memory, in turns."""
    import torch

    from edge_ranker.loader import Loader, Sequence
    from edge_ranker.samples import Samples
    from feature_service.dataset import Dataset, Known
    from feature_service.timeline import cut, hold_out
    from infra.clock import SystemClock
    from reranker.descent import PARTS, Descent

    log, rankers, recipe, rng = _prepared(folder, buffer_events, seed)
    whole = log.spilled.shards.read(range(log.spilled.shards.n))
    data = Dataset(
        **{name: getattr(log.known, name) for name in Known.__dataclass_fields__},
        user=whole.user.astype(np.int64),
        item=whole.item.astype(np.int64),
        ts_us=whole.ts_us,
        first=whole.first,
    )
    fitted = hold_out(cut(data))
    in_memory = Samples(
        fitted,
        rankers.tables.schema,
        fitted.train,
        rng=rng,
        batch_size=recipe.batch_size,
        negatives_per_kind=recipe.negatives_per_kind,
        bucket_share=recipe.bucket_share,
    )
    clock, cpu = SystemClock(), torch.device("cpu")
    sources = {"streamed": log.samples(rankers.tables.schema, recipe, rng), "in memory": in_memory}
    loaders = {
        name: Loader(
            Sequence(source, per_pass=PARTS * steps, first=0, last=PARTS * steps),
            workers=0,
            prefetch=1,
            device=cpu,
            clock=clock,
        )
        for name, source in sources.items()
    }
    spent, spent_cpu = dict.fromkeys(loaders, 0.0), dict.fromkeys(loaders, 0.0)
    rankers.train()
    with Descent(rankers, recipe, "fp32") as descent:
        descent.step(list(in_memory.batches(0, 0, PARTS, 1)), 1e-3)
        for _ in range(0, steps, TURN):
            for name, loader in loaders.items():
                begun_s, begun_cpu_s = time.monotonic(), time.process_time()
                for _ in range(TURN):
                    descent.step(loader.take(PARTS), 1e-3)
                spent[name] += time.monotonic() - begun_s
                spent_cpu[name] += time.process_time() - begun_cpu_s
    events = steps * PARTS * recipe.batch_size
    return {
        **{f"{name} events/s": round(events / seconds) for name, seconds in spent.items()},
        **{f"{name} events per CPU second": round(events / seconds) for name, seconds in spent_cpu.items()},
        **{f"{name} waiting for data": round(loader.wait_s / spent[name], 3) for name, loader in loaders.items()},
        "ratio": round(spent["in memory"] / spent["streamed"], 3),
        "ratio of CPU time": round(spent_cpu["in memory"] / spent_cpu["streamed"], 3),
        "load": round(os.getloadavg()[0], 1),
    }


class Bounded:
    """The first batches of a source as if they were all."""

    def __init__(self, source: object, n_batches: int) -> None:
        self._source = source
        self.n_batches = n_batches

    def batches(self, number: int, start: int, stop: int, step: int) -> Iterator[object]:
        """Those of the source."""
        return self._source.batches(number, start, stop, step)  # type: ignore[attr-defined,no-any-return]


def _prepared(folder: Path, buffer_events: int, seed: int):  # type: ignore[no-untyped-def]
    import torch

    from edge_ranker.tables import Tables
    from feature_service.parts import LogParts
    from feature_service.spill import spill
    from reranker.rankers import Rankers
    from reranker.recipe import Recipe
    from reranker.streamed import StreamedLog
    from reranker.train import schema_for

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    log = StreamedLog(spill(LogParts(folder), folder.with_name(f"{folder.name}.spill")))
    rankers = Rankers(Tables(schema_for(log.n_users(), log.known), log.fitted()))
    return log, rankers, replace(Recipe(), amp="off", buffer_events=buffer_events), np.random.default_rng(seed)


def _rss_mb() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Write the log and measure in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=1000, help="steps of 256 events that are measured")
    parser.add_argument("--buffer-events", type=int, default=2_000_000, help="as of trirank train --stream")
    parser.add_argument("--folder", type=Path, help="where the log is written (default: a temporary folder)")
    parser.add_argument("--only", choices=["streamed", "rates"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    if asked.only is not None:
        print(
            json.dumps(
                {"streamed": streamed, "rates": rates}[asked.only](asked.folder, asked.steps, asked.buffer_events)
            )
        )
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)) / f"log-{asked.events}"
        write_log(folder, asked.events)
        found = {}
        for name in ("streamed", "rates"):
            again = [sys.executable, "-m", "tests.bench.stream_training", "--only", name]
            more = ["--folder", folder, "--steps", asked.steps, "--buffer-events", asked.buffer_events]
            child = subprocess.run([*again, *map(str, more)], check=True, stdout=subprocess.PIPE)
            found[name] = json.loads(child.stdout)
            if not asked.json:
                print(name, *(f"  {what:<34} {number}" for what, number in found[name].items()), sep="\n", flush=True)
    if asked.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
