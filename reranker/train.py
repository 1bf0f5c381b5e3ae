"""From a log of interactions to a release: the whole of training, top to bottom.

Refuses data nothing can be learnt from, and its own result when the exported models over assembled features do not
give the scores the trained models give. Invariant: the release directory appears complete or not at all; what was
computed before a training was interrupted is not lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from edge_ranker.samples import RECALL_SAMPLE
from edge_ranker.tables import Log, Tables
from feature_service.dataset import Known
from feature_service.load import load_dataset
from feature_service.parts import LogParts
from feature_service.schema import FeatureSchema
from feature_service.spill import spill
from feature_service.timeline import Timeline
from infra.clock import Clock, SystemClock
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import Release, read_release
from infra.release_name import check_name
from reranker.amp import choose_precision, has_bf16
from reranker.checkpoint import Checkpoints, Draft
from reranker.compare import check_comparable, compare, in_report
from reranker.evaluate import Scores, Trial, score_trial
from reranker.fitting import COLUMNS, Fitting
from reranker.package import package_release
from reranker.plots import write_plots
from reranker.precisions import RULES, Rules
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.training import RemoteRows
from reranker.report import quality, split_report, summary
from reranker.source import LogInMemory, TrainingLog
from reranker.streamed import StreamedLog
from reranker.threads import one_thread_per_operation

RECIPE = Recipe()
CHECKPOINT_EVERY_S = 60.0


def train_release(
    data: str,
    out: Path,
    *,
    cache: Path,
    seed: int,
    name: str | None = None,
    epochs: int | None = None,
    recipe: Recipe = RECIPE,
    resume: bool = False,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    stream: bool = False,
    compare_with: Path | None = None,
    plots: Path | None = None,
    rules: Rules = RULES,
    rows: RemoteRows | None = None,
    clock: Clock | None = None,
    console: Console | None = None,
) -> Release:
    """Train on `data` (see `feature_service.dataset`) and write the release directory `out`.

    `epochs` passes over the training period (None: what the size of the log asks for). With `resume`, an unfinished
    training of the same release goes on where its newest checkpoint stands. With `stream`, `data` is a folder of
    Parquet files that need not fit into memory. With `compare_with`, that release ranks the same test events and the
    report says what differs; `plots` is a folder for pictures of the report. With `rows`, the rows are in a parameter
    server while they are trained. What happens goes to `console`, standard error by default, with a progress bar when
    that is a terminal. Raises InvalidInput, ReleaseRefused, and with `rows` RowsUnavailable and RowsRefused.
    """
    if out.exists():
        raise ReleaseRefused(f"{out} exists already; a release is never overwritten: choose another name")
    check_name(name or out.name)
    if epochs is not None and epochs < 1:
        raise InvalidInput("epochs", f"{epochs} passes train nothing; give 1 or more")
    if checkpoint_every_s < 0:
        raise InvalidInput("checkpoint-s", f"{checkpoint_every_s:g} is no time between checkpoints; give 0 or more")
    if plots is not None and plots.exists() and not plots.is_dir():
        raise InvalidInput("plots", f"{plots} is a file; name a folder")
    _check(recipe)
    if rows is not None:
        rows.check(recipe, resume=resume)
    other = None if compare_with is None else read_release(compare_with)
    console, clock = console or Console(stderr=True, soft_wrap=True), clock or SystemClock()
    begun_s, begun_cpu_s = clock.monotonic_s(), time.process_time()
    with Draft(out) as draft:
        log = _log(data, cache, draft if stream else None, console)
        if log.known.licence:
            console.print(f"[dim]{log.known.licence}[/dim]", highlight=False)
        if other is not None:
            check_comparable(other, log.split()["test_from"])
        # What would end in a refusal is told now and not after the training: a test period in which there is nothing
        # to rank (with other random numbers than the training's), a folder that cannot be made.
        log.test(np.random.default_rng(seed))
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        schema, passes = schema_for(log.n_users(), log.known), epochs or recipe.passes(log.n_train)
        precision = choose_precision(recipe, bf16=has_bf16()) if rows is None else "fp32"
        identity = {
            "data": log.known.name,
            "data_fingerprint": log.known.fingerprint,
            "seed": seed,
            "passes": passes,
            "streamed": stream,
            "recipe": _that_matters(recipe, stream=stream),
            "schema": schema.fingerprint(),
            "precision": precision,
            "torch": torch.__version__,
        }
        checkpoints = Checkpoints(draft.path, identity, rng, every_s=checkpoint_every_s, clock=clock)
        _say_resume(console, resume=resume, found=checkpoints.open(resume=resume), draft=draft.path)
        with _torch(seed):
            tables = _tables(schema, log.fitted(), recipe) if rows is None else rows.tables(schema, log.fitted())
            rankers = Rankers(tables, edge=recipe.edge, rerank=recipe.rerank, pooling=recipe.pooling)
            fitting = Fitting(rankers, log, recipe, passes, rng, checkpoints, console, clock, precision)
            passes_log = fitting.run() if rows is None else fitting.run_remote(rows, seed)
            seconds = {
                "training": round(clock.monotonic_s() - begun_s, 2),
                "training_cpu": round(time.process_time() - begun_cpu_s, 2),
            }
            timeline, trial = log.test(rng)
            scores = score_trial(rankers, timeline, trial)
            report = {
                **quality(scores, rankers, timeline, trial, recipe),
                "data": log.known.name,
                "data_fingerprint": log.known.fingerprint,
                "licence": log.known.licence,
                "seed": seed,
                "split": split_report(log, timeline, trial),
                "passes": passes_log,
                "recipe": asdict(recipe),
                "precision": precision,
                "rows_elsewhere": None if rows is None else {"staleness": rows.staleness},
                "seconds": seconds,
            }
            if other is not None:
                report["compared_with"] = _compared(other, scores, timeline, trial, schema, seed, console)
            release = package_release(
                rankers,
                timeline,
                trial,
                report,
                out,
                log=log,
                name=name,
                rng=rng,
                clock=clock,
                rules=rules,
                log_loss_negatives=2.0 * recipe.negatives_per_kind,
            )
        draft.discard()
    console.print(summary(release), highlight=False)
    if plots is not None:
        files = write_plots(release.manifest.report, plots)
        console.print(f"{len(files)} plots in {plots}", highlight=False)
    return release


def schema_for(n_users: int, known: Known) -> FeatureSchema:
    """The feature schema for a log of so many trained users: buckets by their number, and the log's event names."""
    usual = FeatureSchema(n_user_buckets=min(max(n_users // 20, 8), 1000))
    more = tuple(name for name in known.events if name not in usual.history_events)
    return FeatureSchema(n_user_buckets=usual.n_user_buckets, history_events=usual.history_events + more)


def _check(recipe: Recipe) -> None:
    if recipe.checked().device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device", "torch finds no CUDA device here; train with --device cpu")


def _log(data: str, cache: Path, draft: Draft | None, console: Console) -> TrainingLog:
    """The log in memory, or spilled into a draft. Raises InvalidInput."""
    if draft is None:
        return LogInMemory(load_dataset(data, cache))
    if not Path(data).is_dir():
        raise InvalidInput("stream", f"{data} is no folder of interactions*.parquet; leave --stream out")
    parts = LogParts(Path(data))
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=parts.n_rows())
        return StreamedLog(spill(parts, draft.path / "spill", on_events=lambda n: progress.advance(task, n)))


def _compared(
    other: Release,
    scores: Scores,
    timeline: Timeline,
    trial: Trial,
    schema: FeatureSchema,
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """The part of the report that says what differs from another release. Its draws have a generator of their own: a
    release does not depend on what it is compared with."""
    rng = np.random.default_rng(seed)
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("comparing", total=trial.events.size)
        found = compare(
            scores, other, timeline, trial, schema.max_history, rng, on_request=lambda: progress.advance(task)
        )
    return in_report(found, other)


def _that_matters(recipe: Recipe, *, stream: bool) -> dict[str, Any]:
    """The recipe without what changes nothing in the result: who makes the batches, unless they are dealt out."""
    nothing = ("prefetch",) if stream else ("prefetch", "workers", "buffer_events")
    return {name: value for name, value in asdict(recipe).items() if name not in nothing}


def _say_resume(console: Console, *, resume: bool, found: bool, draft: Path) -> None:
    if resume and not found:
        console.print(f"no checkpoint in {draft}: training from the start", highlight=False)
    elif resume:
        console.print(f"going on with the unfinished training in {draft}", highlight=False)
    elif found:
        console.print(f"discarded the unfinished training in {draft} (--resume goes on with one)", highlight=False)


def _tables(schema: FeatureSchema, log: Log, recipe: Recipe) -> Tables:
    """Tables with gradients as the recipe wants them. Raises InvalidInput for items too few to be sparse."""
    wanted = recipe.sparse_tables()
    n_items = int((log.item_counts() > 0).sum())
    if wanted and "item" in wanted and n_items <= RECALL_SAMPLE:
        raise InvalidInput(
            "sparse",
            f"with {n_items} items the recall loss touches every row of the table item; it can be sparse with more "
            f"than {RECALL_SAMPLE} items: leave it out",
        )
    return Tables(schema, log, sparse=wanted)


@contextmanager
def _torch(seed: int) -> Iterator[None]:
    """Seeded torch whose operations stay in the thread that calls them; both are as before afterwards."""
    with one_thread_per_operation(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
