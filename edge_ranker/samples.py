"""Training samples in numpy: an event, the history before it, and items the user has not touched.

A share of the samples sees the bucket instead of the user's own row, which is how bucket rows are learnt.
Refuses nothing; randomness comes in as an argument. Invariant: column 0 of `candidates` is the item that was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def make_batch(
    timeline: Timeline, schema: FeatureSchema, events: I64, candidates: I64, as_bucket: BOOL, valid: BOOL | None = None
) -> Batch:
    """The batch for event numbers i64[B] and item numbers i64[B, N]."""
    histories = timeline.histories(schema, events)
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
        users=torch.from_numpy(timeline.dataset.user[events]),
        as_bucket=torch.from_numpy(as_bucket),
        weight=torch.from_numpy(weight),
    )


class Samples:
    """One pass after another over the training events, in a new order each time."""

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
        self._timeline = timeline
        self._schema = schema
        self._events = events
        self._rng = rng
        self._batch_size = min(batch_size, max(1, events.size // 2))
        self._per_kind = negatives_per_kind
        self._bucket_share = bucket_share
        counts = np.bincount(data.item[events], minlength=len(data.item_ids))
        self._n_rows = int((counts > 0).sum())
        self._negatives = Negatives(counts, data.user[events], data.item[events])

    @property
    def n_batches(self) -> int:
        """Batches in one pass; the few events that fill no batch wait for the next pass."""
        return self._events.size // self._batch_size

    def one_pass(self) -> Iterator[Batch]:
        """All batches of one pass."""
        order = self._rng.permutation(self._events)
        for start in range(0, self.n_batches * self._batch_size, self._batch_size):
            yield self._batch(order[start : start + self._batch_size])

    def _batch(self, events: I64) -> Batch:
        data = self._timeline.dataset
        users = data.user[events]
        candidates, valid = [data.item[events][:, None]], [np.ones((events.size, 1), np.bool_)]
        for kind in KINDS:
            drawn, usable = self._negatives.draw(self._rng, users, self._per_kind, kind)
            candidates.append(drawn)
            valid.append(usable)
        as_bucket = self._rng.random(events.size) < self._bucket_share
        batch = make_batch(
            self._timeline,
            self._schema,
            events,
            np.concatenate(candidates, axis=1),
            as_bucket,
            np.concatenate(valid, axis=1),
        )
        if self._n_rows <= RECALL_SAMPLE:
            return batch
        return replace(batch, recall_sample=torch.from_numpy(self._rng.integers(0, self._n_rows, RECALL_SAMPLE)))
