"""Both rankers, the recall and all tables, fitted together in one loop.

One step encodes a batch once and minimises three losses: the edge MLP's, the BST's and the recall's. The best pass on
the validation stretch (the newest part of the training period, held out) is kept.
Two threads compute the gradients of half a step each, on one core each. Torch's own threads meet at the end of every
small operation, which costs half the time on an idle machine and nearly all of it on a busy one.
Refuses nothing; randomness and progress come in as arguments.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from edge_ranker.samples import Batch, Samples
from reranker.rankers import Rankers
from reranker.recipe import Recipe

# Batches per step, each in a thread of its own; fixed, so that every machine computes the same.
PARTS = 2


def fit(
    rankers: Rankers,
    samples: Samples,
    recipe: Recipe,
    *,
    passes: int,
    validate: Callable[[], float],
    on_step: Callable[[], None],
) -> list[dict[str, float]]:
    """Fit in place and return the log of the passes; `validate` gives the number to maximise after each (NaN when
    it cannot tell: then the last pass is kept), `on_step` is called after each step.

    A step is `PARTS` batches of `samples`, one per thread.
    """
    optimizers = _optimizers(rankers, recipe)
    steps = steps_per_pass(samples)
    best, best_state = -math.inf, rankers.state_dict()
    log = []
    with ThreadPoolExecutor(PARTS, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for number in range(passes):
            rankers.train()
            totals = torch.zeros(3)
            for step, parts in enumerate(_grouped(samples.one_pass())):
                done = (number + step / steps) / passes
                _set_rate(optimizers, recipe.learning_rate * one_cycle(done, recipe.warm_up_share))
                totals += _step(rankers, recipe, optimizers, threads, parts)
                on_step()
            rankers.eval()
            rankers.tables.finish()
            score = validate()
            log.append(_pass_log(number, totals / steps, score))
            if not score <= best:
                best, best_state = score, copy.deepcopy(rankers.state_dict())
    rankers.load_state_dict(best_state)
    rankers.eval()
    return log


def steps_per_pass(samples: Samples) -> int:
    """Steps of one pass; a last lone batch is left out."""
    return samples.n_batches // PARTS


def _grouped(batches: Iterator[Batch]) -> Iterator[tuple[Batch, ...]]:
    """`PARTS` batches at a time."""
    return zip(*[batches] * PARTS, strict=False)


def _step(
    rankers: Rankers,
    recipe: Recipe,
    optimizers: list[torch.optim.Optimizer],
    threads: ThreadPoolExecutor,
    parts: tuple[Batch, ...],
) -> Tensor:
    """One step down the mean gradient of all parts; returns the mean losses f32[3]."""
    parameters = list(rankers.parameters())
    done = list(threads.map(lambda batch: _gradients(rankers, recipe, parameters, batch), parts))
    for parameter, *gradients in zip(parameters, *(gradients for _, gradients in done), strict=True):
        present = [g for g in gradients if g is not None]
        parameter.grad = sum(present[1:], start=present[0]) / PARTS if present else None
    for optimizer in optimizers:
        optimizer.step()
    return torch.stack([losses for losses, _ in done]).mean(dim=0)


def _gradients(
    rankers: Rankers, recipe: Recipe, parameters: list[nn.Parameter], batch: Batch
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    edge, rerank, recall = rankers.losses(batch)
    loss = edge + rerank + recipe.recall_weight * recall
    return torch.stack((edge, rerank, recall)).detach(), torch.autograd.grad(loss, parameters, allow_unused=True)


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


def _optimizers(rankers: Rankers, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for all that is dense; Adam on touched rows alone for tables too large for dense gradients."""
    sparse = rankers.tables.sparse
    dense = [p for p in rankers.parameters() if not any(p is other for other in sparse)]
    rate: dict[str, Any] = {"lr": recipe.learning_rate}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(dense, weight_decay=recipe.weight_decay, fused=True, **rate)
    ]
    if sparse:
        optimizers.append(torch.optim.SparseAdam(sparse, **rate))
    return optimizers


def _set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
