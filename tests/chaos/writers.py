"""Producers of a mixed stream: assigns, adds and deletes of shared keys by several threads, known by their times."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from infra.errors import TrirankError
from infra.kafka import LogProducer
from param_server.contract import Op
from param_server.publish import Publisher
from tests.chaos.ledger import Ledger
from tests.support import eventually

_PAUSE_S = 0.01
_times_us = itertools.count(1)


class Writer:
    """One thread with its own producer. `keys` take all operations in log order, `versioned` only the newest."""

    def __init__(self, ledger: Ledger, table_id: int, generation: int, dim: int, keys: Sequence[int],
                 versioned: Sequence[int], seed: int) -> None:  # fmt: skip
        self._ledger = ledger
        self._about = (table_id, generation)
        self._dim = dim
        self._keys = keys
        self._versioned = versioned
        self._random = random.Random(seed)
        self._producer = LogProducer(ledger.bootstrap, delivery_timeout_s=60.0)
        self._publisher = Publisher(self._producer, ledger.topic, ledger.n_partitions)
        self._go = threading.Event()
        self._idle = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{seed}")
        self.published = 0

    def start(self) -> None:
        """Connect and begin; `resume` lets it write."""
        self._producer.start()
        self._thread.start()

    def resume(self) -> None:
        """Write."""
        self._idle.clear()
        self._go.set()

    def pause(self) -> None:
        """Write no more once what was begun is acknowledged or has failed."""
        self._go.clear()
        assert self._idle.wait(120)

    def stop(self) -> None:
        """End the thread and the producer."""
        self._end.set()
        self._go.set()
        self._thread.join(120)
        self._producer.close()

    def _run(self) -> None:
        while not self._end.is_set():
            if not self._go.is_set():
                self._idle.set()
                self._go.wait()
                continue
            self._write()
            self._end.wait(_PAUSE_S)

    def _write(self) -> None:
        time_us = next(_times_us)
        versioned = self._random.random() < 0.3
        op = self._random.choice(
            [Op.ASSIGN, Op.DELETE] if versioned else [Op.ASSIGN, Op.ADD, Op.ADD, Op.ADD, Op.DELETE]
        )
        pool = self._versioned if versioned else self._keys
        # Repeats are wanted: the order inside a record counts too.
        keys = self._random.choices(pool, k=self._random.randint(1, 12))
        rows = np.random.default_rng(time_us).integers(-8, 9, (0 if op is Op.DELETE else len(keys), self._dim))
        versions = None
        if versioned:
            # Late, early and equal ones: out of order is the rule here. Unlike ones inside a record.
            keys = list(dict.fromkeys(keys))
            rows = rows[: len(keys)] if op is not Op.DELETE else rows
            versions = np.array([max(2, time_us + self._random.randint(-50, 50)) for _ in keys], np.uint64)
        wanted = Counter(keys)
        self._ledger.unsure[time_us] = wanted
        try:
            self._publisher.publish(
                op, *self._about, np.array(keys, np.int64), rows.astype(np.float32), time_us, versions=versions
            )
            self._publisher.flush(90.0)
        except TrirankError:
            # Not acknowledged: it may be in the log or not.
            return
        self._ledger.acknowledged[time_us] = wanted
        self.published += 1


@contextmanager
def writing(writers: Sequence[Writer]) -> Iterator[None]:
    """All of them run and write."""
    for writer in writers:
        writer.start()
    try:
        for writer in writers:
            writer.resume()
        eventually(lambda: all(w.published for w in writers), timeout_s=60)
        yield
    finally:
        for writer in writers:
            writer.stop()


@contextmanager
def quiet(writers: Sequence[Writer]) -> Iterator[None]:
    """Nobody writes meanwhile."""
    for writer in writers:
        writer.pause()
    try:
        yield
    finally:
        for writer in writers:
            writer.resume()
