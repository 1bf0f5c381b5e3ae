"""Publishing embedding updates: for training jobs and the command line.

Splits rows by partition, in order, into records of at most 1,024 rows, and counts one as published when the log has
acknowledged it. Refuses what a shard would refuse. Invariant: rows of one key keep their order.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from infra.errors import LogUnavailable
from param_server.contract import F32, I64, U64, Op, UpdateBatch, encode_batch
from param_server.routing import partition_of

RECORD_ROWS = 1024
_MAX_WAITING = 256
_TIMEOUT_S = 30.0


class LogWriter(Protocol):
    """What is needed of `infra.kafka.LogProducer`."""

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        """Accept one record; the future of its offset."""
        ...


class Publisher:
    """`log` is a started LogProducer. For one thread; it may be used again after an error."""

    def __init__(self, log: LogWriter, topic: str, n_partitions: int) -> None:
        self._log = log
        self._topic = topic
        self._n_partitions = n_partitions
        self._waiting: deque[tuple[int, Future[int]]] = deque()
        self._positions: dict[int, int] = {}

    def publish(
        self,
        op: Op,
        table_id: int,
        generation: int,
        keys: I64,
        rows: F32,
        event_time_us: int,
        versions: U64 | None = None,
        base_version: int = 0,
    ) -> int:
        """Send the rows f32[n, dim] of keys i64[n]; return the number of records. `flush` waits for the log.

        A delete takes `rows` f32[0, dim], so that the table's width is checked too. `versions` u64[n] or `base_version`
        order the rows (see `updates.py`); without either the log does. Raises BadRecord for rows no shard would take,
        LogUnavailable or Overloaded when the log is too slow to accept more.
        """
        partitions = partition_of(keys, self._n_partitions)
        order = np.argsort(partitions, kind="stable")
        whole = UpdateBatch(op, table_id, generation, rows.shape[1], base_version, event_time_us, keys, versions, rows)
        records = [
            (int(partition), encode_batch(whole.take(mine[start : start + RECORD_ROWS])))
            for partition in np.unique(partitions)
            for mine in (order[partitions[order] == partition],)
            for start in range(0, mine.size, RECORD_ROWS)
        ]
        for partition, value in records:
            self._make_room()
            self._waiting.append((partition, self._log.send(self._topic, partition, value, wait_s=_TIMEOUT_S)))
        return len(records)

    def flush(self, timeout_s: float = _TIMEOUT_S) -> dict[int, int]:
        """Wait until the log has acknowledged everything; return the offset after the last record, per partition.

        Raises LogUnavailable; what was sent may still be written then.
        """
        end_s = time.monotonic() + timeout_s
        while self._waiting:
            self._settle(max(0.0, end_s - time.monotonic()))
        return dict(self._positions)

    def _make_room(self) -> None:
        while len(self._waiting) >= _MAX_WAITING:
            self._settle(_TIMEOUT_S)

    def _settle(self, timeout_s: float) -> None:
        partition, future = self._waiting.popleft()
        try:
            offset = future.result(timeout_s)
        except TimeoutError as error:
            raise LogUnavailable(f"log: no acknowledgement within {timeout_s:g} s") from error
        self._positions[partition] = max(self._positions.get(partition, 0), offset + 1)
