"""One step of the fit: gradients of several batches, added up, and the optimisers that use them.

On the CPU two threads compute the gradients of a batch each, on one core each. Torch's own threads meet at the end of
every small operation, which costs half the time on an idle machine and nearly all of it on a busy one. On CUDA the
batches follow one another on one stream.
Refuses nothing. Invariant: the result depends neither on which thread is faster nor on how many cores there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from edge_ranker.samples import Batch
from reranker.rankers import Rankers
from reranker.recipe import Recipe

# Batches per step, each in a thread of its own; fixed, so that every machine computes the same.
PARTS = 2

Precision = Literal["fp32", "bf16", "fp16"]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Gradients = list[Tensor | None]


class Descent:
    """Optimisers, threads and the precision of one fit."""

    def __init__(self, rankers: Rankers, recipe: Recipe, precision: Precision) -> None:
        self._rankers = rankers
        self._recall_weight = recipe.recall_weight
        self._precision = precision
        self._device = torch.device(recipe.device)
        self._parameters = list(rankers.parameters())
        self._optimizers = _optimizers(rankers, recipe)
        # fp16 underflows without a scaled loss; bf16 has the range of fp32.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=precision == "fp16")
        self._threads: ThreadPoolExecutor | None = None
        if self._device.type == "cpu":
            self._threads = ThreadPoolExecutor(PARTS, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Descent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def step(self, batches: Sequence[Batch], rate: float) -> Tensor:
        """One step at learning rate `rate` down the mean gradient of all batches; returns the mean losses f32[3]."""
        losses, gradients = self.gradients(batches)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            self._scaler.step(optimizer)
        self._scaler.update()
        return losses

    def gradients(self, batches: Sequence[Batch]) -> tuple[Tensor, _Gradients]:
        """Mean losses f32[3] and the mean gradient of each parameter (None where none takes part), times the scale."""
        self._scaler.scale(torch.zeros((), device=self._device))
        total: _Gradients = [None] * len(self._parameters)
        losses = []
        for found, gradients in self._of_each(batches):
            losses.append(found)
            total = [_added(sum_, new) for sum_, new in zip(total, gradients, strict=True)]
        mean = [None if sum_ is None else sum_ / len(batches) for sum_ in total]
        return torch.stack(losses).mean(dim=0), mean

    def state(self) -> dict[str, Any]:
        """What another descent needs to go on exactly where this one stands."""
        return {"optimizers": [o.state_dict() for o in self._optimizers], "scaler": self._scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        for optimizer, of_optimizer in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
        self._scaler.load_state_dict(state["scaler"])

    def state_bytes(self) -> int:
        """Bytes of optimiser state."""
        tensors = (v for o in self._optimizers for entry in o.state.values() for v in entry.values())
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def _of_each(self, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Iterable[Tensor | None]]]:
        """Losses and gradients of each batch in order; not more than `PARTS` batches are in memory as activations."""
        if self._threads is None:
            yield from map(self._of_one, batches)
            return
        for start in range(0, len(batches), PARTS):
            yield from self._threads.map(self._of_one, batches[start : start + PARTS])

    def _of_one(self, batch: Batch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        half = _HALF.get(self._precision)
        # No cache of cast weights: all threads share it, and what one of them clears another has to round again.
        with torch.autocast(
            self._device.type, dtype=half or torch.bfloat16, enabled=half is not None, cache_enabled=False
        ):
            edge, rerank, recall = self._rankers.losses(batch)
            loss = edge + rerank + self._recall_weight * recall
        found = torch.stack((edge, rerank, recall)).detach()
        return found, torch.autograd.grad(self._scaler.scale(loss), self._parameters, allow_unused=True)


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if total is None else total if new is None else total + new


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
