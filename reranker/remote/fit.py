"""The fit whose rows live in the parameter server: fetch, compute, publish, with a bound on how stale rows may be.

The dense weights are here and are stepped at once. A step's rows come from the parameter server; their changes go to
the stream as numbers to add, so that the changes of steps in flight, or of other trainers, lose nothing of one another.
Step t is computed on rows that have the changes of all steps up to t - 1 - `staleness`, perhaps of later ones; as many
fetches are under way, so that a step waits neither for the broker nor for the shard.
A row that is missing starts from `initial_rows`, published for where there is still none.
Refuses rows that were given a first value, were applied, and are missing again: the table has no room for them.
Invariant: no step is computed on a default row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_ranker.history import logits_of
from edge_ranker.samples import Batch, BatchSource
from edge_ranker.tables import ROW_SPREAD
from edge_ranker.train import edge_logits, encode, ranking_loss, recall_loss
from feature_service.schema import TABLE_IDS
from infra.clock import Clock
from reranker.descent import PARTS
from reranker.fit import one_cycle, steps_per_pass
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.initial import initial_rows
from reranker.remote.rows import Change, Rows, RowService, RowsRefused
from reranker.remote.rowwise import RowwiseAdam
from reranker.remote.working import RowIndex, WorkingSet

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_PULL_ROWS = 8192


@dataclass(frozen=True, slots=True)
class _Underway:
    """A step whose rows were asked for."""

    number: int
    batches: Sequence[Batch]
    numbers: dict[str, I64]
    rows: Future[Mapping[str, Rows]]


class RemoteFit:
    """Fits `rankers`, whose tables are an index without rows, on the rows of `service`."""

    def __init__(
        self, rankers: Rankers, recipe: Recipe, service: RowService, *, seed: int, staleness: int, clock: Clock
    ) -> None:
        self._rankers = rankers
        self._recipe = recipe
        self._service = service
        self._seed = seed
        self._staleness = staleness
        self._clock = clock
        self._index = RowIndex(rankers.tables)
        self._dense = [*rankers.edge.parameters(), *rankers.rerank.parameters()]
        self._dense_optimizer = torch.optim.AdamW(
            self._dense, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        sizes = {name: keys.size for name, keys in self._index.keys.items()}
        self._rows = RowwiseAdam(sizes, weight_decay=recipe.weight_decay)
        # The step that gave a row its first value, -1 before.
        self._begun = {name: np.full(n, -1, np.int32) for name, n in sizes.items()}
        self._n_begun = 0

    def run(self, samples: BatchSource, *, passes: int, on_step: Callable[[], None]) -> list[dict[str, float]]:
        """Fit, then fill the tables of the rankers with all rows; the log of the passes. Raises RowsUnavailable and
        RowsRefused."""
        steps, log = steps_per_pass(samples, self._recipe.accumulate), list[dict[str, float]]()
        todo = self._steps(samples, passes, steps)
        underway: deque[_Underway] = deque()
        self._rankers.train()
        with ThreadPoolExecutor(PARTS, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            self._ask(todo, underway, self._staleness + 1)
            for number in range(passes):
                begun_s, waited_s, losses = self._clock.monotonic_s(), 0.0, torch.zeros(3)
                for _ in range(steps):
                    step = underway.popleft()
                    asked_s = self._clock.monotonic_s()
                    found = step.rows.result()
                    waited_s += self._clock.monotonic_s() - asked_s
                    rate = self._recipe.learning_rate * one_cycle(
                        step.number / (steps * passes), self._recipe.warm_up_share
                    )
                    losses += self._step(step, found, rate, threads)
                    self._ask(todo, underway, 1)
                    on_step()
                seconds = max(self._clock.monotonic_s() - begun_s, 1e-9)
                log.append(_pass_log(number, losses / steps, waited_s / seconds, self._n_begun))
                self._n_begun = 0
        self._pull(passes * steps - 1)
        self._rankers.eval()
        self._rankers.tables.finish()
        return log

    def _steps(self, samples: BatchSource, passes: int, steps: int) -> Iterator[tuple[int, Sequence[Batch]]]:
        group = PARTS * self._recipe.accumulate
        for number in range(passes):
            batches = samples.batches(number, 0, steps * group, 1)
            for step in range(steps):
                yield number * steps + step, [next(batches) for _ in range(group)]

    def _ask(self, todo: Iterator[tuple[int, Sequence[Batch]]], underway: deque[_Underway], n: int) -> None:
        """Ask for the rows of the next n steps."""
        for _ in range(n):
            if (following := next(todo, None)) is None:
                return
            number, batches = following
            numbers = self._index.touched(batches)
            rows = self._service.fetch(self._index.keys_for(numbers), number - 1 - self._staleness)
            underway.append(_Underway(number, batches, numbers, rows))

    def _step(self, step: _Underway, found: Mapping[str, Rows], rate: float, threads: ThreadPoolExecutor) -> Tensor:
        """One step; returns the mean losses f32[3]."""
        changes: list[Change] = []
        rows = {name: self._with_first(step, name, found[name], changes) for name in TABLE_IDS}
        working = WorkingSet(self._index, step.numbers, rows)
        losses, gradients = self._gradients(working, step.batches, threads)
        for parameter, gradient in zip(self._dense, gradients, strict=False):
            parameter.grad = gradient
        for group in self._dense_optimizer.param_groups:
            group["lr"] = rate
        self._dense_optimizer.step()
        for name, gradient in zip(TABLE_IDS, gradients[len(self._dense) :], strict=True):
            if gradient is None:
                continue
            numbers = step.numbers[name]
            at, change = self._rows.change(name, numbers, rows[name], gradient.numpy(), rate)
            if at.size:
                changes.append(Change(name, self._index.keys[name][numbers[at]], change))
        self._service.publish(step.number, changes)
        return losses

    def _with_first(self, step: _Underway, name: str, found: Rows, changes: list[Change]) -> F32:
        """The rows with first values where there are none, which become changes. Raises RowsRefused."""
        rows = np.array(found.rows, np.float32)
        missing = np.flatnonzero(~found.found)
        if not missing.size:
            return rows
        numbers = step.numbers[name][missing]
        begun = self._begun[name]
        applied = step.number - 1 - self._staleness
        if lost := int(((begun[numbers] >= 0) & (begun[numbers] <= applied)).sum()):
            raise RowsRefused(
                f"{lost} rows of table {name} were published and applied, and are missing: its shards have no room "
                "(TRIRANK_TABLE_MIN_CAPACITY_ROWS), or somebody deletes them"
            )
        new = numbers[begun[numbers] < 0]
        begun[new] = step.number
        self._n_begun += new.size
        rows[missing] = initial_rows(
            self._index.keys[name][numbers], rows.shape[1],
            seed=self._seed, table_id=TABLE_IDS[name], spread=ROW_SPREAD[name],
        )  # fmt: skip
        changes.append(Change(name, self._index.keys[name][numbers], rows[missing], first=True))
        return rows

    def _gradients(
        self, working: WorkingSet, batches: Sequence[Batch], threads: ThreadPoolExecutor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Mean losses f32[3] and mean gradients of the dense weights, then of each table's rows."""
        wanted = [*self._dense, *working.rows().values()]
        losses, total = torch.zeros(3), list[Tensor | None]([None] * len(wanted))
        for start in range(0, len(batches), PARTS):
            for one, gradients in threads.map(
                lambda batch: self._of_one(working, batch, wanted), batches[start : start + PARTS]
            ):
                losses += one / len(batches)
                for i, gradient in enumerate(gradients):
                    if gradient is not None:
                        mine = gradient / len(batches)
                        held = total[i]
                        total[i] = mine if held is None else held + mine
        return losses, total

    def _of_one(
        self, working: WorkingSet, batch: Batch, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        encoded = encode(working, batch, self._rankers.pooling)
        edge = ranking_loss(edge_logits(self._rankers.edge, encoded), batch)
        rerank = ranking_loss(logits_of(self._rankers.rerank, encoded.history, encoded.target, encoded.user), batch)
        recall = recall_loss(working, replace(batch, recall_sample=working.localised(batch)), encoded)
        gradients = torch.autograd.grad(edge + rerank + self._recipe.recall_weight * recall, wanted, allow_unused=True)
        return torch.stack((edge, rerank, recall)).detach(), gradients

    def _pull(self, last_step: int) -> None:
        """Fill the tables of the rankers with the rows as they are after the last step."""
        tables = self._rankers.tables
        for name, numbers in self._index.trained().items():
            whole = torch.zeros(self._index.keys[name].size, tables.schema.table_dim(name))
            for start in range(0, numbers.size, _PULL_ROWS):
                some = numbers[start : start + _PULL_ROWS]
                found = self._service.fetch({name: self._index.keys[name][some]}, last_step).result()[name]
                rows = np.array(found.rows, np.float32)
                never = np.flatnonzero(~found.found)
                rows[never] = initial_rows(
                    self._index.keys[name][some[never]], rows.shape[1],
                    seed=self._seed, table_id=TABLE_IDS[name], spread=ROW_SPREAD[name],
                )  # fmt: skip
                whole[torch.from_numpy(some)] = torch.from_numpy(rows)
            setattr(tables, name, nn.Parameter(whole))


def _pass_log(number: int, losses: Tensor, waited: float, begun: int) -> dict[str, float]:
    edge, rerank, recall = losses.tolist()
    return {
        "pass": number + 1,
        "edge_loss": edge,
        "rerank_loss": rerank,
        "recall_loss": recall,
        "data_wait_share": round(waited, 4),
        # Rows that had no value before; 0 in the first pass says that it goes on from rows of an earlier training.
        "rows_begun": begun,
    }
