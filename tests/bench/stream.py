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
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import redis
import uvloop

from infra.deadline import Deadline
from infra.embedded import EmbeddedRedis
from infra.kafka import LogProducer, ensure_topics
from infra.release import Release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import ParameterClient
from param_server.contract import Op
from param_server.publish import Publisher
from param_server.specs import table_specs
from tests.bench.stream_parts import ITEM, N_PARTITIONS, N_ROWS, Apart, make_release, serve, shard_config
from tests.bench.stream_rate import rate
from tests.brokers import Broker, kafka_home, make_broker

MARKER = N_ROWS + 1
KEYS_PER_LOOKUP = 2000


def produce(say: Connection, bootstrap: str, topic: str, generation: int, dim: int, rows_per_s: int) -> None:
    """A steady stream until ended; every 20 ms one publish."""
    producer = LogProducer(bootstrap)
    producer.start()
    publisher = Publisher(producer, topic, N_PARTITIONS)
    rng = np.random.default_rng(2)
    n = rows_per_s // 50
    rows = rng.standard_normal((n, dim), np.float32)
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


async def time_calls(call: Callable[[np.ndarray], Awaitable[object]], seconds: float) -> list[float]:
    """Milliseconds of one lookup of 2,000 random keys after another."""
    rng = np.random.default_rng(3)
    wanted = [rng.integers(0, N_ROWS, KEYS_PER_LOOKUP) for _ in range(64)]
    for keys in wanted:
        await call(keys)
    times: list[float] = []
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        start_s = time.perf_counter()
        await call(wanted[len(times) % 64])
        times.append((time.perf_counter() - start_s) * 1e3)
        # A client that asks a thousand times a second, not one that holds a core.
        await asyncio.sleep(0.0005)
    return times


async def through_redis(folder: Path, dim: int, seconds: float) -> list[float]:
    """The peer: the same rows as strings, one MGET, one join into an array; no found mask."""
    server = EmbeddedRedis(folder / "redis")
    server.start()
    try:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            rows = np.random.default_rng(0).standard_normal((N_ROWS, dim), np.float32)
            for start in range(0, N_ROWS, 10_000):
                client.mset({n.to_bytes(8, "little"): rows[n].tobytes() for n in range(start, start + 10_000)})

            async def call(keys: np.ndarray) -> object:
                values = client.mget([key.tobytes() for key in keys])
                return np.frombuffer(b"".join(values), np.float32).reshape(-1, dim)

            return await time_calls(call, seconds)
    finally:
        server.stop()


async def time_freshness(asker: Asker, publisher: Publisher, generation: int, dim: int, seconds: float) -> list[float]:
    """Milliseconds from before `publish` until a lookup gives the row."""
    marker = np.array([MARKER], np.int64)
    times: list[float] = []
    begin_s = time.perf_counter()
    value = 0
    while time.perf_counter() - begin_s < seconds:
        value += 1
        start_s = time.perf_counter()
        publisher.publish(
            Op.ASSIGN, ITEM, generation, marker, np.full((1, dim), value, np.float32), time.time_ns() // 1000
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
    topic = f"live{given.dim}"
    ensure_topics(broker.bootstrap, {topic: N_PARTITIONS, "dead": 1})
    config = shard_config(folder / topic, broker.bootstrap, topic)
    shard = Apart(serve, config, str(release.path))
    address = shard.hear()
    generation = release.manifest.generation
    producer = LogProducer(broker.bootstrap)
    producer.start()
    results: dict[str, Any] = {}

    async def measure() -> None:
        asker = Asker(release, address)
        await asker.ready()
        peer = await through_redis(folder, given.dim, given.seconds)
        results["redis"] = show(f"Redis MGET of {KEYS_PER_LOOKUP} keys, idle", peer)
        times = await time_calls(asker.rows, given.seconds)
        results["lookup idle"] = show(f"lookup of {KEYS_PER_LOOKUP} keys, idle", times)
        stream = Apart(produce, broker.bootstrap, topic, generation, given.dim, given.rows_per_s)
        sent = stream.hear()
        before, begin_s = await asker.applied(), time.perf_counter()
        times = await time_calls(asker.rows, given.seconds)
        applied = (await asker.applied() - before) / (time.perf_counter() - begin_s)
        results["lookup busy"] = show(f"lookup, {applied / 1e3:.0f} k rows/s applied", times)
        ratio = results["lookup busy"]["p99"] / results["lookup idle"]["p99"]
        print(f"{'p99 under the stream over idle':<44} {ratio:.2f} x (sent {sent / 1e3:.0f} k rows/s)")
        publisher = Publisher(producer, topic, N_PARTITIONS)
        fresh = await time_freshness(asker, publisher, generation, given.dim, given.seconds)
        results["fresh busy"] = show(f"produce -> visible, {given.rows_per_s / 1e3:.0f} k rows/s beside", fresh)
        stream.end()
        fresh = await time_freshness(asker, publisher, generation, given.dim, given.seconds)
        results["fresh idle"] = show("produce -> visible, nothing beside", fresh)
        await asker.close()

    try:
        uvloop.run(measure())
    finally:
        producer.close()
        shard.end()
    return results


def main() -> None:
    """Measure what is asked for."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.stream", description=__doc__)
    options.add_argument("what", nargs="*", default=["rate", "live"], help="rate, live (default both)")
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--record-rows", type=int, nargs="+", default=[16, 1024, 8192])
    options.add_argument("--rows-per-s", type=int, default=100_000)
    options.add_argument("--broker", choices=["apache", "embedded"], default="apache")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    if given.broker == "apache":
        kafka_home()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{given.broker} broker, {cores} cores, load {load:.1f}, dim {given.dim} f32")
    parts = {"rate": rate, "live": live}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        folder = Path(name)
        release = make_release(folder / "release", given.dim)
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
