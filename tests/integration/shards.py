"""A small release, shards in this process or in one that can be killed, and a client to ask them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infra.deadline import Deadline
from infra.kafka import LogProducer, ensure_topics
from infra.logs import configure_logging
from infra.release import Release, TableRows, read_release, write_release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import FetchResult, ParameterClient, PoolTerm, TopkQuery
from param_server.config import ShardConfig
from param_server.contract import Op
from param_server.keeper import Keeping
from param_server.publish import Publisher
from param_server.shard import Shard
from param_server.specs import table_specs
from param_server.table.device import HOST, TableDevice
from tests.support import eventually

T = TypeVar("T")
DIM = 4
N_ITEMS = 50
N_PARTITIONS = 4
ITEM, USER = 4, 1
DEFAULT = np.array([9.0, 8.0, 7.0, 6.0], np.float32)


def item_row(key: int) -> np.ndarray:
    return np.full(DIM, float(key), np.float32)


def make_release(path: Path, name: str = "r1") -> Release:
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    keys = np.arange(N_ITEMS, dtype=np.int64)
    rows = np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)
    table = TableRows(keys, rows, np.ones(N_ITEMS, np.uint64), DEFAULT)
    return write_release(
        path,
        name=name,
        parent=None,
        created_us=1000,
        schema={},
        schema_fingerprint="abc",
        tables={"item": (ITEM, table), "user": (USER, table)},
        models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[],
        users=[],
        requests=[],
        report={},
        made_with={},
    )


@dataclass(frozen=True)
class Topics:
    embeddings: str
    deadletter: str


def make_topics(bootstrap: str) -> Topics:
    stem = f"t{uuid.uuid4().hex[:8]}"
    topics = Topics(f"{stem}.embeddings", f"{stem}.deadletter")
    ensure_topics(bootstrap, {topics.embeddings: N_PARTITIONS, topics.deadletter: 1})
    return topics


def shard_config(folder: Path, bootstrap: str, topics: Topics, index: int = 0, n_shards: int = 1) -> ShardConfig:
    return ShardConfig(
        index=index,
        n_shards=n_shards,
        n_partitions=N_PARTITIONS,
        name=f"shard-{index}",
        bind=f"ipc://{folder}/{index}.sock",
        snapshot_root=folder / "snapshots",
        bootstrap=bootstrap,
        topic=topics.embeddings,
        deadletter_topic=topics.deadletter,
        image_root=folder / "images",
        snapshots=Keeping(interval_s=3600.0),
        table_min_capacity_rows=1,
        table_headroom=4.0,
    )


@contextmanager
def running(config: ShardConfig, release: Release, device: TableDevice = HOST) -> Iterator[str]:
    """A shard in this process; its address."""
    shard = Shard(config, release, device=device)
    address = shard.start()
    try:
        yield address
    finally:
        shard.stop()


def _serve(config: ShardConfig, release: str, answer: Connection) -> None:
    configure_logging("WARNING")
    shard = Shard(config, read_release(Path(release)))
    answer.send(shard.start())
    signal.pause()


class ShardProcess:
    """A shard in a process of its own, to be killed."""

    def __init__(self, config: ShardConfig, release: Release, *, wait: bool = True) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_serve, args=(config, str(release.path), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.address = ""
        self._killed = False
        if wait:
            self.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> None:
        """Wait until it serves."""
        assert self._ours.poll(180)
        self.address = self._ours.recv()

    def kill(self) -> None:
        """kill -9; again does nothing."""
        if self._killed:
            return
        self._killed = True
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._process.close()
        self._ours.close()


class Caller:
    """A client with a loop of its own, for tests that are not coroutines."""

    def __init__(self, release: Release, addresses: Sequence[str], n_shards: int) -> None:
        self._runner = asyncio.Runner()
        self._n_shards = n_shards
        self.generation = release.manifest.generation
        self.wire = WireClient(role="shard")
        self.client = ParameterClient(self.wire, n_shards, N_PARTITIONS, table_specs(release))
        self.run(self._connect(addresses))

    def fetch(
        self, *lookups: tuple[str, Sequence[int]], topk: TopkQuery | None = None, generation: int | None = None,
        timeout_s: float = 10.0,
    ) -> FetchResult:  # fmt: skip
        return self.run(
            self.client.fetch(
                generation=self.generation if generation is None else generation,
                lookups=[(table, np.array(keys, np.int64)) for table, keys in lookups],
                topk=topk,
                deadline=Deadline.after(timeout_s),
            )
        )

    def value(self, key: int, table: str = "item") -> float:
        return float(self.fetch((table, [key])).rows[0][0, 0])

    def health(self, index: int = 0) -> dict[str, Any]:
        """Health of the shard at one of the addresses."""
        name = f"shard-{index}"
        return self.run(self.wire.call("health", deadline=Deadline.after(10.0), peer=name)).args

    def close(self) -> None:
        self.run(self.wire.close())
        self._runner.close()

    async def _connect(self, addresses: Sequence[str]) -> None:
        self.wire.set_peers(
            [Peer(f"shard-{i}", a, meta={"shard": i % self._n_shards}) for i, a in enumerate(addresses)]
        )
        await self.wire.wait_live(len(addresses), deadline=Deadline.after(10.0))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in its loop."""
        return self._runner.run(work)


@contextmanager
def asking(release: Release, *addresses: str, n_shards: int | None = None) -> Iterator[Caller]:
    """A client of these addresses: all first replicas, in the order of shards, then all second ones."""
    caller = Caller(release, addresses, n_shards or len(addresses))
    try:
        yield caller
    finally:
        caller.close()


@contextmanager
def publishing(bootstrap: str, topics: Topics) -> Iterator[Publisher]:
    producer = LogProducer(bootstrap)
    producer.start()
    try:
        yield Publisher(producer, topics.embeddings, N_PARTITIONS)
    finally:
        producer.close()


def recall(k: int, exclude: list[int]) -> TopkQuery:
    def combine(rows: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> np.ndarray:
        vector: np.ndarray = rows[0].sum(axis=0) + rows[1].mean(axis=0, dtype=np.float32)
        return vector

    pool = (PoolTerm(0, "sum"), PoolTerm(1, "mean"))
    return TopkQuery("item", k, np.array(exclude, np.int64), pool, combine)


def ask_snapshot(caller: Caller, *, full: bool = False) -> dict[str, object]:
    """Have a shard write a snapshot and wait for it."""
    name = caller.wire.peers()[0].name
    number = caller.run(caller.wire.call("snapshot", args={"full": full}, deadline=Deadline.after(10), peer=name))
    eventually(lambda: caller.health()["snapshot"]["answered"] >= number.args["number"], timeout_s=30)
    return dict(caller.health()["snapshot"])


def often(config: ShardConfig) -> ShardConfig:
    """The same shard with a snapshot as often as it can write one."""
    return replace(config, snapshots=Keeping(interval_s=0.05, deltas=3))


def publish(
    publisher: Publisher, release: Release, keys: list[int], value: float, op: Op = Op.ASSIGN, generation: int = 0
) -> None:
    n = 0 if op is Op.DELETE else len(keys)
    publisher.publish(
        op,
        ITEM,
        generation or release.manifest.generation,
        np.array(keys, np.int64),
        np.full((n, DIM), value, np.float32),
        2_000_000,
    )
    publisher.flush()
