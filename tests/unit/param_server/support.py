"""Small tables, batches and a log that acknowledges when told to."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np

from infra.errors import Overloaded
from param_server.chain import Chain, Shelf
from param_server.contract import Op, UpdateBatch, encode_batch
from param_server.routing import partition_of
from param_server.snapshot import Owner
from param_server.table.cpu import CpuTable
from param_server.updates import StreamRecord

GENERATION = 7
ITEM = 4
DIM = 2
N_PARTITIONS = 2


def a_table(capacity_rows: int = 16) -> CpuTable:
    return CpuTable(dim=DIM, capacity_rows=capacity_rows, default_row=np.zeros(DIM, np.float32))


def keys_in(partition: int, n: int = 1) -> list[int]:
    """The n least keys from 0 on that belong to a partition."""
    keys = np.arange(100, dtype=np.int64)
    return [int(key) for key in keys[partition_of(keys, N_PARTITIONS) == partition][:n]]


def a_batch(
    keys: list[int],
    value: float = 1.0,
    *,
    op: Op = Op.ASSIGN,
    table_id: int = ITEM,
    generation: int = GENERATION,
    dim: int = DIM,
    base_version: int = 0,
    versions: list[int] | None = None,
    event_time_us: int = 1000,
) -> UpdateBatch:
    rows = np.full((0 if op is Op.DELETE else len(keys), dim), value, np.float32)
    given = None if versions is None else np.array(versions, np.uint64)
    return UpdateBatch(op, table_id, generation, dim, base_version, event_time_us, np.array(keys), given, rows)


def a_record(batch: UpdateBatch, offset: int = 0, partition: int = 0) -> StreamRecord:
    return StreamRecord(partition, offset, encode_batch(batch), batch)


def value_of(table: CpuTable, key: int) -> float | None:
    rows, found = table.lookup(np.array([key]))
    return float(rows[0, 0]) if found[0] else None


class StillClock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def monotonic_s(self) -> float:
        return self.time_s

    def now_us(self) -> int:
        return int(self.time_s * 1e6)


class SteppingClock:
    """Moves by `step_s` each time somebody looks; the time of day stands still."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.time_s = 0.0
        self.step_s = step_s

    def monotonic_s(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def now_us(self) -> int:
        return 9999


class SlowLog:
    """Takes records and acknowledges them when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bytes, bytes | None]] = []
        self.futures: list[Future[int]] = []
        self.full = False

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        if self.full:
            raise Overloaded("full")
        self.sent.append((topic, partition, value, key))
        self.futures.append(Future())
        return self.futures[-1]

    def acknowledge(self) -> None:
        for offset, future in enumerate(self.futures):
            if not future.done():
                future.set_result(offset)


def newest_chain(folder: Path, owner: Owner) -> Chain | None:
    """The newest chain of a folder that can be used; None when there is none."""
    shelf = Shelf(folder, owner).read()
    return next((chain for head in shelf.heads() if (chain := shelf.chain(head)) is not None), None)
