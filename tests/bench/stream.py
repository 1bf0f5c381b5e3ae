"""`python -m tests.bench.stream [rate|live]`: the stream end of one shard, beside what one would write by hand.

rate    rows/s from the log into the table, the whole shard on one core, beside kafka-python alone and a loop by hand
live    2,000 keys through the shard's socket from another process, idle and while --rows-per-s are applied, beside one
        Redis MGET of the same rows; and produce -> visible in a lookup, as a distribution

Every part is a process of its own. The load of the machine is printed: numbers taken beside other work mean little.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from infra.deadline import Deadline
from infra.kafka import LogConsumer, LogProducer, ensure_topics
from infra.release import Release, TableRows, read_release, write_release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import ParameterClient
from param_server.contract import Op, UpdateBatch, encode_batch
from param_server.keeper import Keeping
from param_server.publish import Publisher
from param_server.routing import partition_of
from param_server.shard import Shard, ShardConfig
from param_server.specs import table_specs
from tests.brokers import Broker, kafka_home, make_broker

DIM = 64
ITEM = 4
N_ROWS = 200_000
N_PARTITIONS = 8
MARKER = N_ROWS + 1
KEYS_PER_LOOKUP = 2000
spawn = multiprocessing.get_context("spawn")


def make_release(path: Path) -> Release:
    """One table of 200,000 rows."""
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    keys = np.arange(N_ROWS, dtype=np.int64)
    rows = np.random.default_rng(0).standard_normal((N_ROWS, DIM), np.float32)
    table = TableRows(keys, rows, np.ones(N_ROWS, np.uint64), np.zeros(DIM, np.float32))
    return write_release(
        path, name="r", parent=None, created_us=1, schema={}, schema_fingerprint="s", tables={"item": (ITEM, table)},
        models={"edge": model, "rerank": model}, catalogue=[], users=[], requests=[], report={}, made_with={},
    )  # fmt: skip


class Apart:
    """A function in a process of its own, which says that it is ready and is ended with it."""

    def __init__(self, work: Any, *given: Any) -> None:
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self, timeout_s: float = 120.0) -> Any:
        """What it says next."""
        if not self._ours.poll(timeout_s):
            raise RuntimeError("the other process says nothing")
        return self._ours.recv()

    def end(self) -> None:
        """SIGTERM, and wait."""
        self._process.terminate()
        self._process.join(20)


def cpu_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(say: Connection, config: ShardConfig, release: str, core: int | None) -> None:
    """A shard; with `core` it has that core only, and says when `rows` were applied."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    shard = Shard(config, read_release(Path(release)))
    say.send(shard.start())
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    while not ended:
        signal.pause()
    shard.stop()


# --- rate ----------------------------------------------------------------------------------------------------------


def fill_log(bootstrap: str, topic: str, generation: int, rows: int, record_rows: int) -> int:
    """Records of `record_rows` rows each, spread over the partitions; how many rows were written."""
    rng = np.random.default_rng(1)
    keys = np.arange(N_ROWS, dtype=np.int64)
    homes = partition_of(keys, N_PARTITIONS)
    payload = rng.standard_normal((record_rows, DIM), np.float32)
    written = 0
    producer = LogProducer(bootstrap)
    producer.start()
    try:
        waiting = []
        while written < rows:
            for partition in range(N_PARTITIONS):
                chosen = rng.choice(keys[homes == partition], record_rows)
                batch = UpdateBatch(Op.ASSIGN, ITEM, generation, DIM, 0, time.time_ns() // 1000, chosen, None, payload)
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
    pause = __import__("threading").Event()
    while (applied := shard.health()["counters"]["applied"] + shard.health()["counters"]["stale"]) < rows:
        if applied and begun is None:
            begun = time.perf_counter(), cpu_s()
        pause.wait(0.002)
    start_s, start_cpu_s = begun or (start_s, start_cpu_s)
    say.send((rows / (time.perf_counter() - start_s), rows / (cpu_s() - start_cpu_s)))
    shard.stop()


def _records(bootstrap: str, topic: str, total: int, count: Any) -> Iterator[bytes]:
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


def by_hand(say: Connection, bootstrap: str, topic: str, rows: int, core: int) -> None:
    """The peer: frombuffer, a dict from key to row number, one scatter; no checksum, no versions, no positions."""
    os.sched_setaffinity(0, {core})
    row_of: dict[int, int] = {}
    table = np.empty((2 * N_ROWS, DIM), np.float32)
    begun = None
    for value in _records(bootstrap, topic, rows, _rows_in):
        begun = begun or (time.perf_counter(), cpu_s())
        n = _rows_in(value)
        keys = np.frombuffer(value, np.int64, n, 44).tolist()
        at = [row_of.setdefault(key, len(row_of)) for key in keys]
        table[at] = np.frombuffer(value, np.float32, n * DIM, 44 + 8 * n).reshape(n, DIM)
    say.send((rows / (time.perf_counter() - begun[0]), rows / (cpu_s() - begun[1])))


def rate(given: argparse.Namespace, broker: Broker, release: Release, folder: Path) -> dict[str, Any]:
    """Rows per second, wall and per second of one core."""
    results: dict[str, Any] = {}
    for record_rows in given.record_rows:
        topic = f"rate{record_rows}"
        ensure_topics(broker.bootstrap, {topic: N_PARTITIONS, "dead": 1})
        generation = release.manifest.generation
        rows = fill_log(broker.bootstrap, topic, generation, int(given.seconds * 400_000), record_rows)
        config = shard_config(folder / topic, broker.bootstrap, topic)
        works = {
            "shard": (through_shard, config, str(release.path), rows, 1),
            "by hand": (by_hand, broker.bootstrap, topic, rows, 1),
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


# --- fresh and lookup ------------------------------------------------------------------------------------------------


def produce(say: Connection, bootstrap: str, topic: str, generation: int, rows_per_s: int) -> None:
    """A steady stream until ended; every 20 ms one publish."""
    producer = LogProducer(bootstrap)
    producer.start()
    publisher = Publisher(producer, topic, N_PARTITIONS)
    rng = np.random.default_rng(2)
    n = rows_per_s // 50
    rows = rng.standard_normal((n, DIM), np.float32)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    next_s, told, sent, start_s = time.perf_counter(), False, 0, time.perf_counter()
    while not ended:
        publisher.publish(Op.ASSIGN, ITEM, generation, rng.integers(0, N_ROWS, n), rows, time.time_ns() // 1000)
        sent += n
        next_s += 0.02
        if not told and time.perf_counter() - start_s > 2:
            say.send(sent / (time.perf_counter() - start_s))
            told = True
        time.sleep(max(0.0, next_s - time.perf_counter()))
    producer.close()


class Asker:
    """A client of one shard, in this process."""

    def __init__(self, release: Release, address: str) -> None:
        self._wire = WireClient(role="shard")
        self._wire.set_peers([Peer("shard-0", address, meta={"shard": 0})])
        self._client = ParameterClient(self._wire, 1, N_PARTITIONS, table_specs(release))
        self._generation = release.manifest.generation

    async def ready(self) -> None:
        """Wait until connected."""
        await self._wire.wait_live(1, deadline=Deadline.after(10))

    async def rows(self, keys: np.ndarray) -> np.ndarray:
        """One lookup."""
        got = await self._client.fetch(
            generation=self._generation, lookups=[("item", keys)], topk=None, deadline=Deadline.after(10)
        )
        return got.rows[0]

    async def applied(self) -> int:
        """Rows the shard has applied."""
        health = (await self._wire.call("health", deadline=Deadline.after(10))).args
        return int(health["counters"]["applied"] + health["counters"]["stale"])

    async def close(self) -> None:
        """Disconnect."""
        await self._wire.close()


async def time_lookups(asker: Asker, seconds: float) -> tuple[list[float], float]:
    """Milliseconds of one lookup after another, and rows applied per second meanwhile."""
    rng = np.random.default_rng(3)
    wanted = [rng.integers(0, N_ROWS, KEYS_PER_LOOKUP) for _ in range(64)]
    for keys in wanted:
        await asker.rows(keys)
    times: list[float] = []
    before, begin_s = await asker.applied(), time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        start_s = time.perf_counter()
        await asker.rows(wanted[len(times) % 64])
        times.append((time.perf_counter() - start_s) * 1e3)
        # A client that asks a thousand times a second, not one that holds a core.
        await asyncio.sleep(0.0005)
    return times, (await asker.applied() - before) / (time.perf_counter() - begin_s)


async def time_freshness(asker: Asker, publisher: Publisher, generation: int, seconds: float) -> list[float]:
    """Milliseconds from before `publish` until a lookup gives the row."""
    marker = np.array([MARKER], np.int64)
    times: list[float] = []
    begin_s = time.perf_counter()
    value = 0
    while time.perf_counter() - begin_s < seconds:
        value += 1
        start_s = time.perf_counter()
        publisher.publish(
            Op.ASSIGN, ITEM, generation, marker, np.full((1, DIM), value, np.float32), time.time_ns() // 1000
        )
        while (await asker.rows(marker))[0, 0] != value:
            await asyncio.sleep(0.0005)
        times.append((time.perf_counter() - start_s) * 1e3)
        publisher.flush()
        await asyncio.sleep(0.003 + 0.02 * (value % 7) / 7)
    return times


def show(name: str, times: Sequence[float]) -> dict[str, float]:
    """One line of a distribution, in milliseconds."""
    found = {f"p{q:g}": float(np.percentile(times, q)) for q in (1, 10, 50, 90, 99, 99.9)} | {"max": max(times)}
    print(f"{name:<44} " + "  ".join(f"{q} {v:7.3f}" for q, v in found.items()) + f"  ms, n {len(times)}")
    return found


def live(given: argparse.Namespace, broker: Broker, release: Release, folder: Path) -> dict[str, Any]:
    """Lookups idle and under the stream, and freshness."""
    topic = "live"
    ensure_topics(broker.bootstrap, {topic: N_PARTITIONS, "dead": 1})
    config = shard_config(folder / topic, broker.bootstrap, topic)
    shard = Apart(serve, config, str(release.path), None)
    address = shard.hear()
    generation = release.manifest.generation
    producer = LogProducer(broker.bootstrap)
    producer.start()
    results: dict[str, Any] = {}

    async def measure() -> None:
        asker = Asker(release, address)
        await asker.ready()
        times, _ = await time_lookups(asker, given.seconds)
        results["lookup idle"] = show(f"lookup of {KEYS_PER_LOOKUP} keys, idle", times)
        stream = Apart(produce, broker.bootstrap, topic, generation, given.rows_per_s)
        sent = stream.hear()
        times, applied = await time_lookups(asker, given.seconds)
        results["lookup busy"] = show(f"lookup, {applied / 1e3:.0f} k rows/s applied", times)
        ratio = results["lookup busy"]["p99"] / results["lookup idle"]["p99"]
        print(f"{'p99 under the stream over idle':<44} {ratio:.2f} x (sent {sent / 1e3:.0f} k rows/s)")
        publisher = Publisher(producer, topic, N_PARTITIONS)
        fresh = await time_freshness(asker, publisher, generation, given.seconds)
        results["fresh busy"] = show(f"produce -> visible, {given.rows_per_s / 1e3:.0f} k rows/s beside", fresh)
        stream.end()
        fresh = await time_freshness(asker, publisher, generation, given.seconds)
        results["fresh idle"] = show("produce -> visible, nothing beside", fresh)
        await asker.close()

    try:
        uvloop.run(measure())
    finally:
        producer.close()
        shard.end()
    return results


def shard_config(folder: Path, bootstrap: str, topic: str) -> ShardConfig:
    """One shard with everything as the product sets it, but snapshots out of the way."""
    folder.mkdir(parents=True, exist_ok=True)
    return ShardConfig(
        index=0, n_shards=1, n_partitions=N_PARTITIONS, name="shard-0", bind=f"ipc://{folder}/s.sock",
        snapshot_root=folder / "snapshots", bootstrap=bootstrap, topic=topic, deadletter_topic="dead",
        snapshots=Keeping(3600.0), table_headroom=2.0, table_min_capacity_rows=1,
    )  # fmt: skip


def main() -> None:
    """Measure what is asked for."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.stream", description=__doc__)
    options.add_argument("what", nargs="*", default=["rate", "live"], help="rate, live (default both)")
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--record-rows", type=int, nargs="+", default=[16, 1024, 8192])
    options.add_argument("--rows-per-s", type=int, default=100_000)
    options.add_argument("--broker", choices=["apache", "embedded"], default="apache")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    if given.broker == "apache":
        kafka_home()
    print(f"{given.broker} broker, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, dim {DIM} f32")
    parts = {"rate": rate, "live": live}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        folder = Path(name)
        release = make_release(folder / "release")
        broker = make_broker(given.broker, folder / "broker")
        try:
            for what in given.what:
                results |= parts[what](given, broker, release, folder)
        finally:
            broker.stop()
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
