"""Batches brought to the GPU beside lookups, so that a write costs the owner of the table little time.

The thread that decodes batches fills pinned memory and calls nothing of CUDA. Between lookups the owner takes one short
step at a time: start the copy of a filled batch on a stream of its own; launch its write when it has arrived; take the
counts when it is over. All memory is set aside at construction; who fills waits when every place is taken.
"""

from __future__ import annotations

from queue import Empty, Queue

import numpy as np
import torch

from param_server.contract import MAX_ROWS, Op
from param_server.table import Applied, RowBatch
from param_server.table.gpu_launch import Staged
from param_server.table.gpu_write import Pending, Writer, in_order


class _Place:
    """Pinned and device memory for one batch."""

    def __init__(self, dim: int, most_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # Keys, versions, order.
        self._numbers = torch.empty((3, most_rows), dtype=torch.int64, pin_memory=pinned)
        self._rows = torch.empty((most_rows, dim), dtype=torch.float32, pin_memory=pinned)
        self._device_numbers = torch.empty_like(self._numbers, device=device)
        self._device_rows = torch.empty_like(self._rows, device=device)
        self._event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._n = 0
        self._op = Op.ASSIGN
        self._ordered = False
        self._versioned_rows = False

    def fill(self, batch: RowBatch, dim: int) -> None:
        keys, versions, order = in_order(batch, dim)
        n = self._n = keys.size
        self._op, self._ordered, self._versioned_rows = batch.op, order is None, batch.versioned_rows
        numbers = self._numbers.numpy()
        numbers[0, :n] = keys
        numbers[1, :n] = versions.view(np.int64)
        if order is not None:
            numbers[2, :n] = order
        self._rows.numpy()[: batch.rows.shape[0]] = batch.rows

    def send(self) -> None:
        for i in range(2 if self._ordered else 3):
            self._device_numbers[i, : self._n].copy_(self._numbers[i, : self._n], non_blocking=True)
        if self._op is not Op.DELETE:
            self._device_rows[: self._n].copy_(self._rows[: self._n], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def staged(self) -> Staged:
        keys, versions, order = self._device_numbers[:, : self._n]
        rows = None if self._op is Op.DELETE else self._device_rows[: self._n]
        return Staged(self._op, keys, versions, rows, None if self._ordered else order, self._versioned_rows)


class Staging:
    """A few places for batches of at most `most_rows` rows on their way to one table."""

    def __init__(self, writer: Writer, *, places: int = 3, most_rows: int = MAX_ROWS) -> None:
        self._writer = writer
        self._most_rows = most_rows
        self._free: Queue[_Place] = Queue()
        self._filled: Queue[_Place] = Queue()
        self._sent: _Place | None = None
        self._pending: Pending | None = None
        device = writer.device
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for _ in range(places):
            self._free.put(_Place(writer.dim, most_rows, device))

    def fill(self, batch: RowBatch, timeout_s: float | None = None) -> bool:
        """Take a batch; any one thread. False: no place became free in time. Raises ValueError when it does not fit."""
        if batch.keys.size > self._most_rows:
            raise ValueError(f"{batch.keys.size} rows, a place has {self._most_rows}")
        try:
            place = self._free.get(timeout=timeout_s)
        except Empty:
            return False
        try:
            place.fill(batch, self._writer.dim)
        except ValueError:
            self._free.put(place)
            raise
        self._filled.put(place)
        return True

    def step(self) -> Applied | None:
        """One step of the owner's, none of which waits: what a batch did when its write is over, else None."""
        if self._pending is not None:
            return self._finish(self._pending) if self._pending.counts.arrived() else None
        if self._sent is not None:
            if self._sent.arrived():
                self._pending = self._writer.begin(self._sent.staged())
        elif not self._filled.empty():
            self._sent = self._filled.get()
            with torch.cuda.stream(self._stream):
                self._sent.send()
        return None

    def _finish(self, pending: Pending) -> Applied:
        done = self._writer.finish(pending)
        if self._stream is not None:
            # What `finish` may have launched reads the memory that is given back here.
            self._stream.wait_stream(torch.cuda.current_stream())
        if self._sent is not None:
            self._free.put(self._sent)
        self._pending = self._sent = None
        return done
