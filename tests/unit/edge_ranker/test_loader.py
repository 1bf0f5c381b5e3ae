"""Batches come in their order, whoever makes them and wherever one starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_ranker.loader import Loader, Sequence
from edge_ranker.samples import Batch, Samples
from feature_service.schema import FeatureSchema
from feature_service.timeline import cut
from infra.clock import SystemClock
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)


def _samples() -> Samples:
    timeline = cut(small_dataset())
    return Samples(
        timeline,
        SCHEMA,
        timeline.train,
        rng=np.random.default_rng(3),
        batch_size=32,
        negatives_per_kind=2,
        bucket_share=0.5,
    )


def _loader(sequence: Sequence, workers: int) -> Loader:
    return Loader(sequence, workers=workers, prefetch=2, device=torch.device("cpu"), clock=SystemClock())


class Places:
    """A source whose batches are their places."""

    n_batches = 7

    def batches(self, number: int, start: int, stop: int, step: int) -> Iterator[Batch]:
        for place in range(start, stop, step):
            yield (number, place)  # type: ignore[misc]


def _equal(some: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(some, f), getattr(other, f)) for f in Batch.__slots__ if getattr(some, f) is not None
    )


@given(first=st.integers(0, 20), workers=st.integers(1, 4), per_pass=st.integers(1, 7))
def test_workers_share_the_batches_of_all_passes_in_turn(first: int, workers: int, per_pass: int) -> None:
    last = 3 * per_pass + first
    expected = [divmod(position, per_pass) for position in range(first, last)]
    parts = [
        list(Sequence(Places(), per_pass=per_pass, first=first, last=last).of_worker(w, workers))
        for w in range(workers)
    ]
    in_turn = [parts[n % workers][n // workers] for n in range(last - first)]
    assert in_turn == expected
    assert sum(map(len, parts)) == len(expected)


def test_worker_processes_give_the_batches_the_fit_would_have_made_itself() -> None:
    samples = _samples()
    alone = [b for number in range(2) for b in samples.batches(number, 0, 12, 1)][5:]
    sequence = Sequence(samples, per_pass=12, first=5, last=24)
    for workers in (0, 2):
        with _loader(sequence, workers) as loader:
            found = loader.take(19)
            assert loader.wait_s > 0
        assert all(_equal(some, other) for some, other in zip(alone, found, strict=True))


def test_passes_differ_and_the_same_seed_repeats_them() -> None:
    first, again = _samples(), _samples()
    one, two = (next(first.batches(number, 0, 1, 1)) for number in (0, 1))
    assert not torch.equal(one.users, two.users)
    assert _equal(one, next(again.one_pass()))
    assert _equal(two, next(again.one_pass()))


def test_loading_takes_nothing_from_the_generator_of_the_fit() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with _loader(Sequence(_samples(), per_pass=12, first=0, last=12), 0) as loader:
        loader.take(2)
    assert torch.equal(torch.rand(3), expected)
