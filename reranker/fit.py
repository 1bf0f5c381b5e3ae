"""Both rankers, the recall and all tables, fitted together in one loop.

One step encodes batches once and minimises three losses: the edge MLP's, the BST's and the recall's. The best pass on
the validation stretch (the newest part of the training period, held out) is kept.
Refuses a step larger than a pass; randomness and progress come in as arguments. Invariant: a fit that goes on from a
checkpoint ends with the bits of one that was never interrupted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edge_ranker.loader import Loader, Sequence
from edge_ranker.samples import BatchSource
from infra.clock import Clock, SystemClock
from infra.errors import InvalidInput
from reranker.checkpoint import Checkpoints
from reranker.descent import PARTS, Descent, Precision
from reranker.rankers import Rankers
from reranker.recipe import Recipe

__all__ = ["PARTS", "Progress", "Rankers", "Recipe", "fit", "one_cycle", "steps_per_pass"]


@dataclass(slots=True)
class Progress:
    """Where a fit stands: `step` steps of pass `number` are done, with these sums of losses; `stale` passes have
    brought nothing since the best, whose state is kept unless it is the final one."""

    number: int = 0
    step: int = 0
    losses: Tensor = field(default_factory=lambda: torch.zeros(3))
    log: list[dict[str, float]] = field(default_factory=list)
    best: float = -math.inf
    best_state: dict[str, Tensor] | None = None
    stale: int = 0


def fit(
    rankers: Rankers,
    samples: BatchSource,
    recipe: Recipe,
    *,
    passes: int,
    validate: Callable[[], float],
    on_step: Callable[[], None],
    precision: Precision = "fp32",
    checkpoints: Checkpoints | None = None,
    clock: Clock | None = None,
) -> list[dict[str, float]]:
    """Fit in place and return the log of the passes; `validate` gives the number to maximise after each (NaN when
    it cannot tell: then the last pass is kept), `on_step` is called after each step, those before a resume included.

    A step is `PARTS * recipe.accumulate` batches of `samples`. Raises InvalidInput when a pass has fewer.
    """
    steps = steps_per_pass(samples, recipe.accumulate)
    if steps == 0:
        raise InvalidInput(
            "accumulate", f"a step takes {PARTS * recipe.accumulate} batches, a pass has {samples.n_batches}; give less"
        )
    with Descent(rankers, recipe, precision) as descent:
        run = _Run(rankers, recipe, descent, checkpoints, clock or SystemClock(), passes, steps)
        run.restore()
        for _ in range(run.steps_done):
            on_step()
        with run.loader(samples) as loader:
            while run.goes_on:
                run.one_pass(loader, validate, on_step)
    return run.finished()


@dataclass(slots=True)
class _Run:
    """One fit under way."""

    rankers: Rankers
    recipe: Recipe
    descent: Descent
    checkpoints: Checkpoints | None
    clock: Clock
    passes: int
    steps: int
    progress: Progress = field(default_factory=Progress)

    @property
    def steps_done(self) -> int:
        return self.progress.number * self.steps + self.progress.step

    @property
    def goes_on(self) -> bool:
        stopped = 0 < self.recipe.patience <= self.progress.stale
        return self.progress.number < self.passes and not stopped

    def loader(self, samples: BatchSource) -> Loader:
        """From the first batch that is not yet used to the last of all passes."""
        group = PARTS * self.recipe.accumulate
        per_pass = self.steps * group
        sequence = Sequence(samples, per_pass=per_pass, first=self.steps_done * group, last=self.passes * per_pass)
        return Loader(
            sequence,
            workers=self.recipe.workers,
            prefetch=self.recipe.prefetch,
            device=torch.device(self.recipe.device),
            clock=self.clock,
        )

    def one_pass(self, loader: Loader, validate: Callable[[], float], on_step: Callable[[], None]) -> None:
        """The rest of the present pass, its validation and what it is worth."""
        progress, group = self.progress, PARTS * self.recipe.accumulate
        begun_s, waited_s, events = self.clock.monotonic_s(), loader.wait_s, 0
        self.rankers.train()
        while progress.step < self.steps:
            batches = loader.take(group)
            progress.losses += self.descent.step(batches, self._rate()).cpu()
            events += sum(batch.users.shape[0] for batch in batches)
            progress.step += 1
            on_step()
            if self.checkpoints is not None and self.checkpoints.due():
                self._save()
        seconds = self.clock.monotonic_s() - begun_s
        self.rankers.eval()
        self.rankers.tables.finish()
        entry = _pass_log(progress.number, progress.losses / self.steps, validate())
        entry["data_wait_share"] = round((loader.wait_s - waited_s) / seconds, 4) if seconds > 0 else 0.0
        entry["events_per_s"] = round(events / seconds, 1) if seconds > 0 else 0.0
        progress.log.append(entry)
        self._judge(entry["validation_auc"])
        progress.number, progress.step, progress.losses = progress.number + 1, 0, torch.zeros(3)
        if self.checkpoints is not None and self.goes_on:
            self._save()

    def finished(self) -> list[dict[str, float]]:
        """The log; the rankers are those of the best pass."""
        if self.progress.best_state is not None:
            self.rankers.load_state_dict(self.progress.best_state)
        self.rankers.eval()
        return self.progress.log

    def restore(self) -> None:
        """Go on where the checkpoint stands, if there is one to go on from."""
        state = None if self.checkpoints is None else self.checkpoints.load()
        if state is not None:
            self.rankers.load_state_dict(state["rankers"])
            self.descent.load(state["descent"])
            self.progress = Progress(**state["progress"])

    def _rate(self) -> float:
        done = self.steps_done / (self.steps * self.passes)
        return self.recipe.learning_rate * one_cycle(done, self.recipe.warm_up_share)

    def _judge(self, score: float) -> None:
        progress, last = self.progress, self.progress.number == self.passes - 1
        if not score <= progress.best:
            state = None if last else copy.deepcopy(self.rankers.state_dict())
            progress.best, progress.best_state, progress.stale = score, state, 0
        else:
            progress.stale += 1

    def _save(self) -> None:
        progress: dict[str, Any] = {name: getattr(self.progress, name) for name in Progress.__slots__}
        state = {"rankers": self.rankers.state_dict(), "descent": self.descent.state(), "progress": progress}
        if self.checkpoints is not None:
            self.checkpoints.save(state)


def steps_per_pass(samples: BatchSource, accumulate: int = 1) -> int:
    """Steps of one pass; batches that fill no step are left out."""
    return samples.n_batches // (PARTS * accumulate)


def _pass_log(number: int, losses: Tensor, score: float) -> dict[str, float]:
    edge, rerank, recall = losses.tolist()
    return {
        "pass": number + 1,
        "edge_loss": edge,
        "rerank_loss": rerank,
        "recall_loss": recall,
        "validation_auc": score,
    }


def one_cycle(done: float, warm_up_share: float) -> float:
    """Share of the peak rate after `done` of all steps: cosine up from 4 %, then cosine down to 0."""
    if done < warm_up_share:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * done / warm_up_share)) / 2
    return (1 + math.cos(math.pi * (done - warm_up_share) / (1 - warm_up_share))) / 2
