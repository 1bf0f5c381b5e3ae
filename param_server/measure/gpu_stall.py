"""Latency of lookups while rows are applied: one owner thread answers and writes, another brings batches to the card.

Lookups arrive on a schedule, not when the last one is done, so a lookup that has to wait for a batch shows it. Times
are from the arrival to the rows in host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from param_server.contract import Op
from param_server.measure import gpu_timing as timing
from param_server.measure.lines import Line
from param_server.table import RowBatch
from param_server.table.gpu import GpuTable
from param_server.table.gpu_staging import Staging

KEYS = 4096
ARRIVALS_PER_S = 2000
BATCH_ROWS = 1 << 16
ROWS_PER_S = 1_000_000
BATCHES = 16
SECONDS = 8.0


def stall(slots: int, load: float) -> list[Line]:
    """p50, p99 and the longest lookup of 4,096 keys, idle and while 1 M rows/s are applied; and the longest step."""
    table, keys = timing.filled_table(slots, load, 64, "f32")
    table.warm(KEYS)
    wanted = [some.cpu().numpy() for some in timing.sample(keys, KEYS, 64)]
    _answer(table, wanted, 1.0, lambda: None)
    idle = _answer(table, wanted, SECONDS, lambda: None)
    feed = _Feed(table, keys)
    feed.start()
    _answer(table, wanted, 1.0, feed.step)
    feed.steps_us.clear()
    feed.applied = 0
    busy = _answer(table, wanted, SECONDS, feed.step)
    feed.stop()
    lines = []
    for name, times in (("idle", idle), ("1 M rows/s applied", busy)):
        for percent in (50, 99, 99.9, 100):
            us = float(np.percentile(times, percent))
            lines.append(Line(f"lookup of {KEYS} keys, {name}, p{percent}", round(us, 1), len(times), "lookups"))
    ratio = float(np.percentile(busy, 99) / np.percentile(idle, 99))
    lines.append(Line("p99, applied over idle", 0.0, round(ratio, 3), "x", "<= 1.2"))
    lines.append(
        Line(
            f"longest step of the owner, batches of {BATCH_ROWS}",
            round(max(feed.steps_us), 1),
            feed.applied / SECONDS / 1e6,
            "M rows/s",
        )
    )
    return lines


def _answer(table: GpuTable, wanted: list[np.ndarray], seconds: float, between: Callable[[], None]) -> list[float]:
    """Latency in us of lookups that arrive every 1 / ARRIVALS_PER_S seconds."""
    times: list[float] = []
    start = time.perf_counter()
    for i in range(int(seconds * ARRIVALS_PER_S)):
        due = start + i / ARRIVALS_PER_S
        between()
        while time.perf_counter() < due:
            time.sleep(0)  # lets the other thread run; sleeping longer would come back too late
        table.lookup(wanted[i % len(wanted)])
        times.append((time.perf_counter() - due) * 1e6)
    return times


class _Feed:
    """Fills batches at ROWS_PER_S on a thread of its own; the owner steps."""

    def __init__(self, table: GpuTable, keys: torch.Tensor) -> None:
        self._staging = Staging(table.writer, most_rows=BATCH_ROWS)
        self._keys = [some.cpu().numpy() for some in timing.sample(keys, BATCH_ROWS, BATCHES)]
        rng = np.random.default_rng(2)
        self._rows = [rng.standard_normal((BATCH_ROWS, table.dim)).astype(np.float32) for _ in range(BATCHES)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill)
        self.steps_us: list[float] = []
        self.applied = 0

    def start(self) -> None:
        """Begin to fill."""
        self._thread.start()

    def stop(self) -> None:
        """Stop filling; what is filled is not written."""
        self._stopped.set()
        self._thread.join()

    def step(self) -> None:
        """What the owner does between lookups."""
        begin = time.perf_counter()
        done = self._staging.step()
        self.steps_us.append((time.perf_counter() - begin) * 1e6)
        if done is not None:
            self.applied += done.applied + done.stale

    def _fill(self) -> None:
        start, turn = time.perf_counter(), 0
        while not self._stopped.wait(max(0.0, start + turn * BATCH_ROWS / ROWS_PER_S - time.perf_counter())):
            versions = np.full(BATCH_ROWS, turn + 2, np.uint64)
            batch = RowBatch(Op.ASSIGN, self._keys[turn % BATCHES], versions, self._rows[turn % BATCHES])
            if self._staging.fill(batch, timeout_s=0.1):
                turn += 1
