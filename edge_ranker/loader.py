"""The data loader of a fit: batches in their order, made here or by worker processes ahead of time.

Refuses nothing. Invariant: the sequence of batches of a source in memory is the same for any number of workers.
Workers are started once for a whole fit and run on into the next pass while this one is validated. They are fresh
processes, not forks: a fork of a process with threads may hang for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from edge_ranker.samples import Batch, BatchSource
from infra.clock import Clock


class Sequence(IterableDataset[Batch]):
    """Batches number `first` to before `last`, `per_pass` from each pass; a worker of w gives every w-th."""

    def __init__(self, source: BatchSource, *, per_pass: int, first: int, last: int) -> None:
        super().__init__()
        self._source = source
        self._per_pass = per_pass
        self._first = first
        self._last = last

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        return self.of_worker(0, 1) if info is None else self.of_worker(info.id, info.num_workers)

    def of_worker(self, worker: int, step: int) -> Iterator[Batch]:
        """Every `step`-th batch, beginning with number `first + worker`."""
        position = self._first + worker
        while position < self._last:
            number, start = divmod(position, self._per_pass)
            stop = min(self._per_pass, self._last - number * self._per_pass)
            yield from self._source.batches(number, start, stop, step)
            position += len(range(start, stop, step)) * step


class Loader:
    """Hands out the batches of a `Sequence` on a device; `wait_s` is how long the fit has waited for them so far."""

    def __init__(self, sequence: Sequence, *, workers: int, prefetch: int, device: torch.device, clock: Clock) -> None:
        """`prefetch` batches per worker are made ahead; pinned memory on CUDA."""
        self._device = device
        self._clock = clock
        self._batches: Iterator[Batch] | None = iter(
            DataLoader(
                sequence,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                persistent_workers=workers > 0,
                multiprocessing_context="spawn" if workers else None,
                pin_memory=device.type == "cuda",
                # A generator of its own: the loader's seed is not taken from the one of the fit.
                generator=torch.Generator(),
            )
        )
        self.wait_s = 0.0

    def take(self, n: int) -> list[Batch]:
        """The next `n` batches."""
        if self._batches is None:
            raise ValueError("the loader is closed")
        begun_s = self._clock.monotonic_s()
        taken = [next(self._batches).to(self._device) for _ in range(n)]
        self.wait_s += self._clock.monotonic_s() - begun_s
        return taken

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The iterator ends its workers when it goes.
        self._batches = None
