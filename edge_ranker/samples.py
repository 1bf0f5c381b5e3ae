"""Training samples in numpy: an event, the history before it, and items the user has not touched.

A share of the samples sees the bucket instead of the user's own row, which is how bucket rows are learnt.
Refuses nothing; randomness comes in as an argument. Invariants: column 0 of `candidates` is the item that was taken;
a batch depends on the seed, the pass and its place in the pass alone, so that any worker can make any batch and a fit
that was interrupted goes on with the batch it would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_service.interactions import Interactions
from feature_service.negatives import KINDS, Negatives
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline

I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

# Up to this many items the recall loss is exact; beyond it, a sample of this size stands for all.
RECALL_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples with N candidates. `items` i64[M] are the distinct items of the batch; `hist` i64[B, L] and
    `candidates` i64[B, N] are positions in it; `gaps` i64[B, L]; `mask` f32[B, L]; `users` i64[B]; `as_bucket`
    bool[B]; `weight` f32[B, N], 0 for candidates that are none; `recall_sample` i64[S] are the table rows that
    stand for all items in the recall loss, None when all take part."""

    items: Tensor
    hist: Tensor
    gaps: Tensor
    mask: Tensor
    candidates: Tensor
    users: Tensor
    as_bucket: Tensor
    weight: Tensor
    recall_sample: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; from pinned memory the copies do not wait."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; the data loader's pinning thread calls this."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


class BatchSource(Protocol):
    """Passes over a training period, batch by batch."""

    @property
    def n_batches(self) -> int:
        """Batches in one pass; the few events that fill no batch wait for the next pass."""
        ...

    def batches(self, number: int, start: int, stop: int, step: int) -> Iterator[Batch]:
        """Every `step`-th batch of pass `number`, from place `start` to before `stop`."""
        ...


def make_batch(
    log: Timeline | Interactions,
    schema: FeatureSchema,
    events: I64,
    candidates: I64,
    as_bucket: BOOL,
    valid: BOOL | None = None,
) -> Batch:
    """The batch for event numbers i64[B] and item numbers i64[B, N]."""
    log = log.dataset.interactions if isinstance(log, Timeline) else log
    histories = log.histories(schema, events)
    both = np.concatenate((histories.items, candidates), axis=1)
    items, position = np.unique(both, return_inverse=True)
    position = position.reshape(both.shape)
    length = schema.max_history
    weight = np.ones(candidates.shape, np.float32) if valid is None else valid.astype(np.float32)
    return Batch(
        items=torch.from_numpy(items),
        hist=torch.from_numpy(np.ascontiguousarray(position[:, :length])),
        gaps=torch.from_numpy(histories.gaps),
        mask=torch.from_numpy(histories.mask),
        candidates=torch.from_numpy(np.ascontiguousarray(position[:, length:])),
        users=torch.from_numpy(log.user[events].astype(np.int64, copy=False)),
        as_bucket=torch.from_numpy(as_bucket),
        weight=torch.from_numpy(weight),
    )


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """How events become samples. `n_rows` is the number of items with a row."""

    schema: FeatureSchema
    negatives_per_kind: int
    bucket_share: float
    n_rows: int

    def batch(self, log: Interactions, negatives: Negatives, events: I64, rng: np.random.Generator) -> Batch:
        """The samples of event numbers i64[B]."""
        users = log.user[events].astype(np.int64, copy=False)
        candidates = [log.item[events].astype(np.int64, copy=False)[:, None]]
        valid = [np.ones((events.size, 1), np.bool_)]
        for kind in KINDS:
            drawn, usable = negatives.draw(rng, users, self.negatives_per_kind, kind)
            candidates.append(drawn)
            valid.append(usable)
        as_bucket = rng.random(events.size) < self.bucket_share
        batch = make_batch(
            log, self.schema, events, np.concatenate(candidates, axis=1), as_bucket, np.concatenate(valid, axis=1)
        )
        if self.n_rows <= RECALL_SAMPLE:
            return batch
        return replace(batch, recall_sample=torch.from_numpy(rng.integers(0, self.n_rows, RECALL_SAMPLE)))


class Draws:
    """The generator of everything random in the batches of one fit, each found by its place."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def order(self, number: int, *place: int) -> np.random.Generator:
        """For the order of events in pass `number`; `place` is the part of the log, when it has parts."""
        return np.random.default_rng((self._seed, number, 0, *place))

    def batch(self, number: int, position: int, lane: int = 0) -> np.random.Generator:
        """For the batch at one position of pass `number`, of one of several lanes."""
        return np.random.default_rng((self._seed, number, 1, position, lane))


class Samples:
    """One pass after another over training events in memory, in a new order each time."""

    def __init__(
        self,
        timeline: Timeline,
        schema: FeatureSchema,
        events: I64,
        *,
        rng: np.random.Generator,
        batch_size: int,
        negatives_per_kind: int,
        bucket_share: float,
    ) -> None:
        data = timeline.dataset
        self._log = data.interactions
        self._events = events
        self._draws = Draws(int(rng.integers(2**62)))
        self._batch_size = min(batch_size, max(1, events.size // 2))
        counts = np.bincount(data.item[events], minlength=len(data.item_ids))
        self._maker = SampleMaker(schema, negatives_per_kind, bucket_share, int((counts > 0).sum()))
        self._negatives = Negatives(counts, data.user[events], data.item[events])
        self._passes = 0

    @property
    def n_batches(self) -> int:
        """Batches in one pass; the few events that fill no batch wait for the next pass."""
        return self._events.size // self._batch_size

    def one_pass(self) -> Iterator[Batch]:
        """All batches of the next pass."""
        self._passes += 1
        return self.batches(self._passes - 1, 0, self.n_batches, 1)

    def batches(self, number: int, start: int, stop: int, step: int) -> Iterator[Batch]:
        """Every `step`-th batch of pass `number`, from place `start` to before `stop`."""
        order = self._draws.order(number).permutation(self._events)
        for position in range(start, stop, step):
            events = order[position * self._batch_size : (position + 1) * self._batch_size]
            yield self._maker.batch(self._log, self._negatives, events, self._draws.batch(number, position))
