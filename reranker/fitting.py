"""The fit with what surrounds it: training batches, validation, the device and the progress bar.

Refuses nothing. Invariant: afterwards the rankers are on the CPU, those of the best pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edge_ranker.samples import BatchSource
from infra.clock import Clock
from reranker.checkpoint import Checkpoints
from reranker.descent import Precision
from reranker.evaluate import validation_auc
from reranker.fit import fit, steps_per_pass
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.training import RemoteRows
from reranker.source import TrainingLog

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.percentage:>3.0f} %"),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


@dataclass(slots=True)
class Fitting:
    """The fit with what surrounds it: validation, the choice of precision, the progress bar."""

    rankers: Rankers
    log: TrainingLog
    recipe: Recipe
    passes: int
    rng: np.random.Generator
    checkpoints: Checkpoints
    console: Console
    clock: Clock
    precision: Precision

    def run(self) -> list[dict[str, float]]:
        """Fit; the rankers are on the CPU afterwards. Returns the log of the passes."""
        samples = self.log.samples(self.rankers.tables.schema, self.recipe, self.rng)
        fitted, trial = self.log.validation(self.rng)
        self.rankers.to(self.recipe.device)
        with self._progress(samples) as on_step:
            passes_log = fit(
                self.rankers,
                samples,
                self.recipe,
                passes=self.passes,
                validate=lambda: validation_auc(self.rankers, fitted, trial),
                on_step=on_step,
                precision=self.precision,
                checkpoints=self.checkpoints,
                clock=self.clock,
            )
        self.rankers.cpu()
        return passes_log

    def run_remote(self, rows: RemoteRows, seed: int) -> list[dict[str, float]]:
        """Fit on rows in a parameter server; the tables hold them afterwards. The last pass is kept."""
        samples = self.log.samples(self.rankers.tables.schema, self.recipe, self.rng)
        fitted, trial = self.log.validation(self.rng)
        with self._progress(samples) as on_step:
            passes_log = rows.fit(
                self.rankers, samples, self.recipe, passes=self.passes, seed=seed, on_step=on_step, clock=self.clock
            )
        passes_log[-1]["validation_auc"] = validation_auc(self.rankers, fitted, trial)
        return passes_log

    @contextmanager
    def _progress(self, samples: BatchSource) -> Iterator[Callable[[], None]]:
        total = self.passes * steps_per_pass(samples, self.recipe.accumulate)
        console = self.console
        if not console.is_terminal:
            console.print(f"training: {total} steps in {self.passes} passes", highlight=False)
        with Progress(*COLUMNS, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("training", total=total)
            yield lambda: progress.advance(task)
