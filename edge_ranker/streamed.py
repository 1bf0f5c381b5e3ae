"""Training batches from a spilled log: whole shards in a bounded buffer, shuffled there.

A pass goes over the log in rounds. In each round every block of shards is loaded once and gives one share of its
events, in a random order; the blocks come in another order each round. Everybody is thus met all along a pass and not
in one stretch of it, at the price of reading the log once per round (16 bytes per event).
Blocks are dealt out to lanes, one per worker process of each rank; every lane gives the same number of batches.
Refuses more lanes than blocks. Invariants: only events that are trained on are in the buffer at all; an event is used
at most once per pass; a log that fits the buffer gives the batches of `samples.Samples`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_ranker.samples import Batch, Draws, SampleMaker
from feature_service.interactions import Interactions
from feature_service.negatives import Negatives
from feature_service.schema import FeatureSchema
from feature_service.spill import Spill
from infra.errors import InvalidInput

I64 = NDArray[np.int64]

MAX_ROUNDS = 8
# Events that fill no batch at the end of a visit wait for the next pass; in so many batches they are few.
_VISIT_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Ranks:
    """Trainers that share the passes of one fit, and which of them this is."""

    rank: int = 0
    world: int = 1


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class _Lane:
    """Blocks of shards of one worker of one rank, and the events of each."""

    number: int
    blocks: list[list[int]]
    events: list[int]


class StreamedSamples:
    """One pass after another over the training events of a spill. `buffer_events` are in memory at a time, in all
    workers of this rank together."""

    def __init__(
        self,
        spill: Spill,
        schema: FeatureSchema,
        *,
        rng: np.random.Generator,
        batch_size: int,
        negatives_per_kind: int,
        bucket_share: float,
        buffer_events: int,
        workers: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises InvalidInput when the log has fewer blocks than workers."""
        n_events = int(spill.shard_events.sum())
        self._shards = spill.shards
        self._shard_events = spill.shard_events
        self._item_counts = spill.fitted.items
        self._until_us = spill.validation_from_us
        self._batch_size = min(batch_size, max(1, n_events // 2))
        self._draws = Draws(int(rng.integers(2**62)))
        self._maker = SampleMaker(schema, negatives_per_kind, bucket_share, int((spill.fitted.items > 0).sum()))
        self._step = max(1, workers)
        self._ranks = ranks
        lanes = self._step * ranks.world
        dealt = _dealt(self._shard_events, lanes, self._draws)
        if not all(dealt):
            raise InvalidInput(
                "workers", f"the log has {(self._shard_events > 0).sum()} parts to share among {lanes}; give fewer"
            )
        self._lanes = [self._lane(n, shards, buffer_events // self._step) for n, shards in enumerate(dealt)]
        n_blocks = max(len(lane.blocks) for lane in self._lanes)
        of_visit = n_events // (lanes * n_blocks * self._batch_size * _VISIT_BATCHES)
        self._rounds = max(1, min(MAX_ROUNDS, n_blocks, of_visit))
        self._in_lane = min(sum(self._sizes(lane)) for lane in self._lanes)

    @property
    def n_batches(self) -> int:
        """Batches of one pass of this rank."""
        return self._in_lane * self._step

    def batches(self, number: int, start: int, stop: int, step: int) -> Iterator[Batch]:
        """Every `step`-th batch of pass `number`, from place `start` to before `stop`; `step` is the number of
        workers this was made for."""
        if step != self._step:
            raise ValueError(f"made for {self._step} workers, asked for {step}")
        lane = self._lanes[self._ranks.rank * step + start % step]
        place, end = start // step, -(-(stop - start % step) // step)
        begin = 0
        for round_, block in self._visits(number, lane):
            size = self._size(lane.events[block], round_)
            if begin < end and begin + size > place:
                wanted = range(max(begin, place), min(begin + size, end))
                yield from self._of_block(number, round_, lane, block, begin, wanted)
            begin += size

    def _visits(self, number: int, lane: _Lane) -> Iterator[tuple[int, int]]:
        """Rounds and blocks of one pass in their order."""
        for round_ in range(self._rounds):
            order = self._draws.order(number, 1, round_, lane.number).permutation(len(lane.blocks))
            yield from ((round_, block) for block in order.tolist())

    def _of_block(
        self, number: int, round_: int, lane: _Lane, block: int, begin: int, wanted: range
    ) -> Iterator[Batch]:
        """The batches at places `wanted` of the lane, of one visit to one block that begins at place `begin`."""
        log = self._shards.read(lane.blocks[block], self._until_us)
        negatives = Negatives(self._item_counts, *_as_i64(log))
        place = () if len(self._lanes) * len(lane.blocks) == 1 else (2, lane.number, block)
        order = self._draws.order(number, *place).permutation(np.arange(log.item.size))
        first, _ = self._share(order.size, round_)
        for position in wanted:
            at = first + (position - begin) * self._batch_size
            events = order[at : at + self._batch_size]
            yield self._maker.batch(log, negatives, events, self._draws.batch(number, position, lane.number))

    def _lane(self, number: int, shards: list[int], most: int) -> _Lane:
        """The shards of one lane in blocks of at most `most` events (or one shard)."""
        blocks: list[list[int]] = [[]]
        events = [0]
        for shard in shards:
            more = int(self._shard_events[shard])
            if blocks[-1] and events[-1] + more > most:
                blocks.append([])
                events.append(0)
            blocks[-1].append(shard)
            events[-1] += more
        return _Lane(number, blocks, events)

    def _sizes(self, lane: _Lane) -> Iterator[int]:
        return (self._size(events, round_) for events in lane.events for round_ in range(self._rounds))

    def _size(self, events: int, round_: int) -> int:
        """Batches of one visit to a block; events that fill none are left out."""
        first, end = self._share(events, round_)
        return (end - first) // self._batch_size

    def _share(self, events: int, round_: int) -> tuple[int, int]:
        return events * round_ // self._rounds, events * (round_ + 1) // self._rounds


def _dealt(shard_events: I64, lanes: int, draws: Draws) -> list[list[int]]:
    """Shards of each lane, in random order, so that a few of them are like the whole log, and of about the same
    number of events."""
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    events = [0] * lanes
    for shard in draws.order(0, 3).permutation(np.flatnonzero(shard_events)).tolist():
        lane = events.index(min(events))
        dealt[lane].append(shard)
        events[lane] += int(shard_events[shard])
    return dealt


def _as_i64(log: Interactions) -> tuple[I64, I64]:
    return log.user.astype(np.int64, copy=False), log.item.astype(np.int64, copy=False)
