"""From a log of interactions to a release: the whole of training, top to bottom.

Refuses data nothing can be learnt from, and its own result when the exported models over assembled features do not
give the scores the trained models give. Invariant: the release directory appears complete or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edge_ranker.samples import Samples
from edge_ranker.tables import Tables
from feature_service.dataset import load_dataset
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut, hold_out
from infra.clock import Clock, SystemClock
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import Release
from reranker.evaluate import (
    N_NEGATIVES,
    Trial,
    make_trial,
    quality_report,
    recall_report,
    score_trial,
    spread_over_users,
    validation_auc,
)
from reranker.fit import fit, steps_per_pass
from reranker.package import package_release
from reranker.rankers import Rankers
from reranker.recipe import Recipe

I64 = NDArray[np.int64]

TEST_EVENTS = 2000
VALIDATION_EVENTS = 400
RECIPE = Recipe()


def train_release(
    data: str,
    out: Path,
    *,
    cache: Path,
    seed: int,
    name: str | None = None,
    epochs: int | None = None,
    recipe: Recipe = RECIPE,
    clock: Clock | None = None,
    console: Console | None = None,
) -> Release:
    """Train on `data` (see `feature_service.dataset`) and write the release directory `out`.

    `epochs` passes over the training period (None: what the size of the log asks for). What happens goes to `console`,
    standard error by default, with a progress bar when that is a terminal. Raises InvalidInput, ReleaseRefused.
    """
    if out.exists():
        raise ReleaseRefused(f"{out} exists already; a release is never overwritten: choose another name")
    if epochs is not None and epochs < 1:
        raise InvalidInput("epochs", f"{epochs} passes train nothing; give 1 or more")
    console, clock = console or Console(stderr=True, soft_wrap=True), clock or SystemClock()
    begun_s, begun_cpu_s = clock.monotonic_s(), time.process_time()
    dataset = load_dataset(data, cache)
    if dataset.licence:
        console.print(f"[dim]{dataset.licence}[/dim]", highlight=False)
    timeline = cut(dataset)
    fitted = hold_out(timeline)
    rng = np.random.default_rng(seed)
    with _torch(seed):
        rankers = Rankers(Tables(schema_for(timeline), fitted))
        passes = epochs or recipe.passes(fitted.train.size)
        log = _fit(rankers, fitted, recipe, passes, rng, console)
        seconds = {
            "training": round(clock.monotonic_s() - begun_s, 2),
            "training_cpu": round(time.process_time() - begun_cpu_s, 2),
        }
        trial = _test_trial(timeline, fitted, rng)
        scores = score_trial(rankers, timeline, trial)
        report = {
            "data": dataset.name,
            "data_fingerprint": dataset.fingerprint,
            "licence": dataset.licence,
            "seed": seed,
            "split": _split_report(timeline, fitted, trial),
            "n_test_events": int(trial.events.size),
            "negatives_per_event": N_NEGATIVES,
            "models": quality_report(scores, timeline, trial, 2.0 * recipe.negatives_per_kind),
            "recall": recall_report(scores, timeline, trial, rankers.tables.schema),
            "passes": log,
            "recipe": asdict(recipe),
            "seconds": seconds,
        }
        release = package_release(rankers, timeline, trial, report, out, name=name or out.name, rng=rng, clock=clock)
    console.print(summary(release), highlight=False)
    return release


def schema_for(timeline: Timeline) -> FeatureSchema:
    """The feature schema for this log: buckets by the number of users, and the log's own event names."""
    n_users = int(timeline.trained_users().sum())
    usual = FeatureSchema(n_user_buckets=min(max(n_users // 20, 8), 1000))
    more = tuple(name for name in timeline.dataset.events if name not in usual.history_events)
    return FeatureSchema(n_user_buckets=usual.n_user_buckets, history_events=usual.history_events + more)


def summary(release: Release) -> str:
    """What a person wants to know of a trained release, in a few lines."""
    report = release.manifest.report
    lines = [f"{report['n_test_events']} test events after {report['split']['test_from']}, AUC uniform / popularity:"]
    for model, by_kind in report["models"].items():
        lines.append(f"  {model:<10} {by_kind['uniform']['auc']:.4f} / {by_kind['popularity']['auc']:.4f}")
    recall = ", ".join(f"{name} {value:.3f}" for name, value in report["recall"].items())
    lines.append(f"  {recall}")
    lines.append(f"release {release.manifest.name} in {release.path}, trained in {report['seconds']['training']:.0f} s")
    return "\n".join(lines)


def _fit(
    rankers: Rankers, fitted: Timeline, recipe: Recipe, passes: int, rng: np.random.Generator, console: Console
) -> list[dict[str, float]]:
    samples = Samples(
        fitted,
        rankers.tables.schema,
        fitted.train,
        rng=rng,
        batch_size=recipe.batch_size,
        negatives_per_kind=recipe.negatives_per_kind,
        bucket_share=recipe.bucket_share,
    )
    events = spread_over_users(fitted, fitted.test, VALIDATION_EVENTS, rng)
    trial = make_trial(fitted, fitted.item_counts(), events, rng)
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=passes * steps_per_pass(samples))
        return fit(
            rankers,
            samples,
            recipe,
            passes=passes,
            validate=lambda: validation_auc(rankers, fitted, trial),
            on_step=lambda: progress.advance(task),
        )


def _test_trial(timeline: Timeline, fitted: Timeline, rng: np.random.Generator) -> Trial:
    events = spread_over_users(timeline, timeline.test, TEST_EVENTS, rng)
    trial = make_trial(timeline, fitted.item_counts(), events, rng)
    if trial.events.size == 0:
        raise InvalidInput(timeline.dataset.name, "every user of the test period has touched every item")
    return trial


def _split_report(timeline: Timeline, fitted: Timeline, trial: Trial) -> dict[str, Any]:
    data = timeline.dataset
    test_users = np.unique(data.user[timeline.test])
    return {
        "kind": "one cut in time for all users",
        "train_from": _moment(int(data.ts_us.min())),
        "validation_from": _moment(fitted.test_from_us),
        "test_from": _moment(timeline.test_from_us),
        "test_until": _moment(int(data.ts_us.max())),
        "train_events": int(fitted.train.size),
        "validation_events": int(fitted.test.size),
        "test_events": int(timeline.test.size),
        "test_users": int(test_users.size),
        "test_users_without_row": int((~fitted.trained_users()[test_users]).sum()),
        "ranked_items_without_row": int((fitted.item_counts()[data.item[trial.events]] == 0).sum()),
    }


def _moment(ts_us: int) -> str:
    return datetime.fromtimestamp(ts_us / 1e6, UTC).isoformat(timespec="seconds")


@contextmanager
def _torch(seed: int) -> Iterator[None]:
    """Seeded torch whose operations stay in the thread that calls them; both are as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
