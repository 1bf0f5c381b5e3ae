"""How fast one shard on one core takes in a log that is there; beside kafka-python alone and a loop written by hand."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from infra.kafka import LogConsumer, LogProducer, ensure_topics
from infra.release import Release, read_release
from param_server.config import ShardConfig
from param_server.contract import Op, UpdateBatch, encode_batch
from param_server.routing import partition_of
from param_server.shard import Shard
from tests.bench.stream_parts import ITEM, N_PARTITIONS, N_ROWS, Apart, cpu_s, shard_config
from tests.brokers import Broker


def fill_log(bootstrap: str, topic: str, generation: int, dim: int, rows: int, record_rows: int) -> int:
    """Records of `record_rows` rows each, spread over the partitions; how many rows were written."""
    rng = np.random.default_rng(1)
    keys = np.arange(N_ROWS, dtype=np.int64)
    homes = partition_of(keys, N_PARTITIONS)
    payload = rng.standard_normal((record_rows, dim), np.float32)
    written = 0
    producer = LogProducer(bootstrap)
    producer.start()
    try:
        waiting = []
        while written < rows:
            for partition in range(N_PARTITIONS):
                chosen = rng.choice(keys[homes == partition], record_rows)
                batch = UpdateBatch(Op.ASSIGN, ITEM, generation, dim, 0, time.time_ns() // 1000, chosen, None, payload)
                waiting.append(producer.send(topic, partition, encode_batch(batch), wait_s=60.0))
                written += record_rows
        for ack in waiting:
            ack.result(120)
    finally:
        producer.close()
    return written


def through_shard(say: Connection, config: ShardConfig, release: str, rows: int, core: int) -> None:
    """Time from the first to the last row applied, and processor time of the whole process meanwhile."""
    os.sched_setaffinity(0, {core})
    shard = Shard(config, read_release(Path(release)))
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    shard.start()
    begun: tuple[float, float] | None = None
    pause = threading.Event()
    while (applied := shard.health()["counters"]["applied"] + shard.health()["counters"]["stale"]) < rows:
        if applied and begun is None:
            begun = time.perf_counter(), cpu_s()
        pause.wait(0.002)
    start_s, start_cpu_s = begun or (start_s, start_cpu_s)
    say.send((rows / (time.perf_counter() - start_s), rows / (cpu_s() - start_cpu_s)))
    shard.stop()


def _records(bootstrap: str, topic: str, total: int, count: Callable[[bytes], int]) -> Iterator[bytes]:
    consumer = LogConsumer(bootstrap, topic, range(N_PARTITIONS), positions={})
    consumer.start()
    seen = 0
    try:
        while seen < total:
            for record in consumer.poll(0.5, 64):
                seen += count(record.value)
                yield record.value
    finally:
        consumer.close()


def _rows_in(value: bytes) -> int:
    return int.from_bytes(value[20:24], "little")


def through_kafka_alone(say: Connection, bootstrap: str, topic: str, rows: int, core: int) -> None:
    """kafka-python, the values thrown away: what no consumer in this language can beat."""
    os.sched_setaffinity(0, {core})
    begun = None
    for _ in _records(bootstrap, topic, rows, _rows_in):
        begun = begun or (time.perf_counter(), cpu_s())
    say.send((rows / (time.perf_counter() - begun[0]), rows / (cpu_s() - begun[1])))


def by_hand(say: Connection, bootstrap: str, topic: str, rows: int, core: int, dim: int) -> None:
    """The peer: frombuffer, a dict from key to row number, one scatter; no checksum, no versions, no positions."""
    os.sched_setaffinity(0, {core})
    row_of: dict[int, int] = {}
    table = np.empty((2 * N_ROWS, dim), np.float32)
    begun = None
    for value in _records(bootstrap, topic, rows, _rows_in):
        begun = begun or (time.perf_counter(), cpu_s())
        n = _rows_in(value)
        keys = np.frombuffer(value, np.int64, n, 44).tolist()
        at = [row_of.setdefault(key, len(row_of)) for key in keys]
        table[at] = np.frombuffer(value, np.float32, n * dim, 44 + 8 * n).reshape(n, dim)
    say.send((rows / (time.perf_counter() - begun[0]), rows / (cpu_s() - begun[1])))


def rate(given: argparse.Namespace, broker: Broker, release: Release, folder: Path) -> dict[str, Any]:
    """Rows per second, wall and per second of one core."""
    results: dict[str, Any] = {}
    for record_rows in given.record_rows:
        topic = f"rate{given.dim}-{record_rows}"
        ensure_topics(broker.bootstrap, {topic: N_PARTITIONS, "dead": 1})
        generation = release.manifest.generation
        rows = fill_log(broker.bootstrap, topic, generation, given.dim, int(given.seconds * 400_000), record_rows)
        config = shard_config(folder / topic, broker.bootstrap, topic)
        works = {
            "shard": (through_shard, config, str(release.path), rows, 1),
            "by hand": (by_hand, broker.bootstrap, topic, rows, 1, given.dim),
            "kafka-python alone": (through_kafka_alone, broker.bootstrap, topic, rows, 1),
        }
        for turn in range(given.rounds):
            for name, (work, *arguments) in works.items():
                if name == "shard":
                    arguments[0] = replace(config, snapshot_root=folder / f"{topic}-{turn}")
                apart = Apart(work, *arguments)
                per_s, per_cpu_s = apart.hear(300)
                apart.end()
                results.setdefault(f"{name}, {record_rows} rows a record", []).append((per_s, per_cpu_s))
    for name, runs in results.items():
        best = max(runs)
        print(f"{name:<44} {best[0] / 1e3:8.0f} k rows/s  {max(r[1] for r in runs) / 1e3:8.0f} k rows per core second")
    return results
