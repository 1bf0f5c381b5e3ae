"""Streamed batches are the batches of a log in memory, within a buffer, and never of the test period."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_ranker.samples import Batch, Samples
from edge_ranker.streamed import Ranks, StreamedSamples
from feature_service.dataset import Dataset
from feature_service.folder import read_folder
from feature_service.parts import LogParts
from feature_service.schema import FeatureSchema
from feature_service.spill import Spill, spill
from feature_service.timeline import Timeline, cut, hold_out
from infra.errors import InvalidInput

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)
N_EVENTS, BATCH = 1500, 32


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Spill]:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("log")
    pl.DataFrame(
        {
            "user_id": rng.integers(0, 90, N_EVENTS),
            "item_id": rng.integers(0, 60, N_EVENTS),
            "event": ["click"] * N_EVENTS,
            "ts": 1_700_000_000 + rng.integers(0, 10**6, N_EVENTS),
        }
    ).write_parquet(folder / "interactions.parquet")
    return read_folder(folder), spill(LogParts(folder), folder / "spill", users_per_shard=8)


def _streamed(spilled: Spill, buffer_events: int, batch_size: int = BATCH, **more: object) -> StreamedSamples:
    return StreamedSamples(
        spilled,
        SCHEMA,
        rng=np.random.default_rng(1),
        batch_size=batch_size,
        negatives_per_kind=2,
        bucket_share=0.5,
        buffer_events=buffer_events,
        **more,  # type: ignore[arg-type]
    )


def _in_memory(fitted: Timeline) -> Samples:
    return Samples(
        fitted,
        SCHEMA,
        fitted.train,
        rng=np.random.default_rng(1),
        batch_size=BATCH,
        negatives_per_kind=2,
        bucket_share=0.5,
    )


def _equal(some: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(some, f), getattr(other, f)) for f in Batch.__slots__ if getattr(some, f) is not None
    )


def _events(batch: Batch, data: Dataset) -> list[tuple[int, int, tuple[int, ...]]]:
    """(user, item, history) of every sample, which is all a model sees of an event."""
    taken = batch.items[batch.candidates[:, 0]].tolist()
    lengths = batch.mask.sum(dim=1).int().tolist()
    histories = batch.items[batch.hist].tolist()
    return [
        (user, item, tuple(history[len(history) - n :]))
        for user, item, history, n in zip(batch.users.tolist(), taken, histories, lengths, strict=True)
    ]


def _known_events(data: Dataset, fitted: Timeline) -> dict[tuple[int, int, tuple[int, ...]], int]:
    """How often each of them is in the training period."""
    counts: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for event in fitted.train.tolist():
        user = int(data.user[event])
        past = data.item[max(int(data.first[user]), event - SCHEMA.max_history) : event]
        key = (user, int(data.item[event]), tuple(past.tolist()))
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_a_log_that_fits_the_buffer_gives_the_batches_of_a_log_in_memory(log: tuple[Dataset, Spill]) -> None:
    data, spilled = log
    in_memory, streamed = _in_memory(hold_out(cut(data))), _streamed(spilled, N_EVENTS)
    assert streamed.n_batches == in_memory.n_batches
    for number in (0, 1, 5):
        expected = list(in_memory.batches(number, 0, in_memory.n_batches, 1))
        found = list(streamed.batches(number, 0, streamed.n_batches, 1))
        assert all(_equal(some, other) for some, other in zip(expected, found, strict=True))


@settings(max_examples=15, deadline=None)
@given(
    buffer_events=st.integers(100, 2000),
    workers=st.integers(0, 3),
    world=st.integers(1, 2),
    number=st.integers(0, 3),
)
def test_a_pass_meets_events_of_the_training_period_once_each(
    log: tuple[Dataset, Spill], buffer_events: int, workers: int, world: int, number: int
) -> None:
    data, spilled = log
    fitted = hold_out(cut(data))
    known = _known_events(data, fitted)
    met: dict[tuple[int, int, tuple[int, ...]], int] = {}
    n_batches = set()
    for rank in range(world):
        samples = _streamed(spilled, buffer_events, workers=workers, ranks=Ranks(rank, world))
        n_batches.add(samples.n_batches)
        step = max(1, workers)
        for worker in range(step):
            for batch in samples.batches(number, worker, samples.n_batches, step):
                assert batch.users.shape == (BATCH,)
                for key in _events(batch, data):
                    met[key] = met.get(key, 0) + 1
    assert len(n_batches) == 1
    assert all(times <= known.get(key, 0) for key, times in met.items())
    # What fills no batch at the end of a visit, and what one lane has more than the least, waits for the next pass.
    if buffer_events > 800 and workers < 2 and world == 1:
        assert sum(met.values()) > 0.9 * fitted.train.size


def test_a_place_in_a_pass_is_the_same_batch_wherever_one_starts(log: tuple[Dataset, Spill]) -> None:
    _, spilled = log
    for workers in (0, 2):
        samples, step = _streamed(spilled, 400, batch_size=4, workers=workers), max(1, workers)
        for worker in range(step):
            whole = list(samples.batches(1, worker, samples.n_batches, step))
            for skipped in (1, 4, 9):
                rest = list(samples.batches(1, worker + skipped * step, samples.n_batches, step))
                assert len(rest) == len(whole) - skipped
                assert all(_equal(some, other) for some, other in zip(rest, whole[skipped:], strict=True))


def test_a_user_is_met_all_along_a_pass(log: tuple[Dataset, Spill]) -> None:
    _, spilled = log
    samples = _streamed(spilled, 300, batch_size=2)
    batches = list(samples.batches(0, 0, samples.n_batches, 1))
    half = len(batches) // 2
    early, late = (set(torch.cat([b.users for b in some]).tolist()) for some in (batches[:half], batches[half:]))
    assert len(early & late) > 0.8 * len(early | late)


def test_the_buffer_bounds_what_is_read_at_once(log: tuple[Dataset, Spill], monkeypatch: pytest.MonkeyPatch) -> None:
    _, spilled = log
    sizes = []
    read = type(spilled.shards).read

    def counted(self: object, shards: list[int], before_us: int) -> object:
        part = read(self, shards, before_us)  # type: ignore[arg-type]
        sizes.append(part.item.size)
        assert part.ts_us.max() < spilled.validation_from_us
        return part

    monkeypatch.setattr(type(spilled.shards), "read", counted)
    samples = _streamed(spilled, 400, batch_size=4)
    list(samples.batches(0, 0, samples.n_batches, 1))
    assert len(sizes) > 4
    assert max(sizes) <= 400


def test_more_workers_than_parts_are_refused(log: tuple[Dataset, Spill]) -> None:
    _, spilled = log
    with pytest.raises(InvalidInput, match="workers: the log has 12 parts to share among 13; give fewer"):
        _streamed(spilled, 400, workers=13)
    with pytest.raises(ValueError, match="made for 2 workers"):
        list(_streamed(spilled, 400, workers=2).batches(0, 0, 4, 3))


def test_a_change_of_the_data_after_the_cut_changes_no_training_batch(
    log: tuple[Dataset, Spill], tmp_path: Path
) -> None:
    """What happened in the validation and test periods is invisible to training."""
    data, spilled = log
    folder = tmp_path / "changed"
    folder.mkdir()
    for shard in range(spilled.shards.n):
        records = spilled.shards.records(shard)
        later = records["ts_us"] >= spilled.validation_from_us
        records["item"][later] = (records["item"][later] + 17) % len(data.item_ids)
        records.tofile(folder / f"shard-{shard:06d}.spill")
    changed = replace(spilled, shards=replace(spilled.shards, folder=folder))
    for some, other in zip(
        _streamed(spilled, 400).batches(0, 0, 20, 1), _streamed(changed, 400).batches(0, 0, 20, 1), strict=True
    ):
        assert _equal(some, other)
