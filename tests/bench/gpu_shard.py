"""`python -m tests.bench.gpu_shard plain|snapshot|ray`: a whole shard with its tables on a GPU, beside one on the CPU.

plain   `Shard` in a process of its own behind its socket, without Ray: 2,000 keys from this process, idle and while
        rows are applied from the log; recall; a snapshot while it serves; a restart from that
snapshot   the same shard: lookups idle and while one full snapshot is written, and how long that takes; for many rows
ray     the shards of a stack as Ray actors, each with a part of a GPU: answers, a kill -9 of one under lookups, and the
        time until all rows are there again

Broker and Redis are the embedded ones: nothing outside the machine is needed. Every answer that is timed is checked.
`--device cpu` runs all of it without a GPU. Times are wall times: say what else the machine does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from infra.deadline import Deadline
from infra.directory import read_directory
from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.kafka import ensure_topics
from infra.release import Release, TableRows, read_release, write_release
from infra.settings import Settings
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import FetchResult, ParameterClient, PoolTerm, TopkQuery
from param_server.config import ShardConfig
from param_server.shard import Shard
from param_server.specs import table_specs
from param_server.table.device import open_device
from param_server.tiering import Tiering
from tests.bench.stream import produce
from tests.bench.stream_parts import ITEM, N_PARTITIONS, Apart, shard_config

KEYS = 2000
SETS = 64


def make_release(path: Path, rows: int, dim: int) -> Release:
    """One table whose rows begin with their key."""
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    keys = np.arange(rows, dtype=np.int64)
    values = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    values[:, 0] = keys
    table = TableRows(keys, values, np.ones(rows, np.uint64), np.zeros(dim, np.float32))
    return write_release(
        path, name="r", parent=None, created_us=1, schema={}, schema_fingerprint="s", tables={"item": (ITEM, table)},
        models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[], users=[], requests=[], report={}, made_with={},
    )  # fmt: skip


def serve(say: Connection, config: ShardConfig, release: str, device: str) -> None:
    """A shard until ended; says its address and how long the start took."""
    start_s = time.perf_counter()
    shard = Shard(config, read_release(Path(release)), device=open_device(device, given=True))
    say.send((shard.start(), time.perf_counter() - start_s))
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    while not ended:
        signal.pause()
    shard.stop()


class Asker:
    """A client of shards, in this process."""

    def __init__(self, release: Release, peers: list[Peer], n_shards: int, n_partitions: int) -> None:
        self.wire = WireClient(role="shard")
        self.wire.set_peers(peers)
        self._peers = len(peers)
        self._client = ParameterClient(self.wire, n_shards, n_partitions, table_specs(release))
        self._generation = release.manifest.generation
        rows = release.manifest.tables[0].rows
        self.sets = np.random.default_rng(3).integers(0, rows, (SETS, min(KEYS, rows)))

    async def ready(self) -> None:
        """Wait until connected."""
        await self.wire.wait_live(self._peers, deadline=Deadline.after(30))

    async def rows(self, i: int) -> FetchResult:
        """One lookup of 2,000 keys."""
        return await self._client.fetch(
            generation=self._generation, lookups=[("item", self.sets[i % SETS])], topk=None, deadline=Deadline.after(10)
        )

    async def recall(self, i: int) -> FetchResult:
        """One recall of 500 rows by the row of one key."""
        query = TopkQuery(
            "item", 500, np.empty(0, np.int64), (PoolTerm(0, "sum"),), lambda rows, _: rows[0].sum(axis=0)
        )
        return await self._client.fetch(
            generation=self._generation, lookups=[("item", self.sets[i % SETS, :1])], topk=query,
            deadline=Deadline.after(10),
        )  # fmt: skip

    async def health(self) -> dict[str, Any]:
        """Health of the first peer."""
        peer = self.wire.peers()[0].name
        return (await self.wire.call("health", deadline=Deadline.after(30), peer=peer)).args

    async def check(self) -> None:
        """Every row is there and is its key's, unless a stream has written it since."""
        got = await self.rows(0)
        if not got.found[0].all() or not np.array_equal(got.rows[0][:, 0], self.sets[0].astype(np.float32)):
            raise SystemExit("a lookup gave a wrong answer")


async def timed(call: Callable[[int], Awaitable[object]], seconds: float) -> list[float]:
    """Milliseconds of one call after another."""
    for i in range(SETS):
        await call(i)
    times: list[float] = []
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        start_s = time.perf_counter()
        await call(len(times))
        times.append((time.perf_counter() - start_s) * 1e3)
        await asyncio.sleep(0.0005)
    return times


def show(results: dict[str, Any], name: str, times: list[float]) -> None:
    """One line, and its numbers for `--json`."""
    results[name] = {f"p{q:g}": float(np.percentile(times, q)) for q in (1, 50, 99, 100)}
    print(f"{name:<52} " + "  ".join(f"{q} {v:8.3f}" for q, v in results[name].items()) + f"  ms, n {len(times)}")


def plain(given: argparse.Namespace, release: Release, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """One shard without Ray."""
    results: dict[str, Any] = {}
    for device in dict.fromkeys((given.device, "cpu")):
        topic = f"plain-{device.replace(':', '-')}"
        ensure_topics(broker.bootstrap, {topic: N_PARTITIONS, "dead": 1})
        config = shard_config(folder / topic, broker.bootstrap, topic)
        if given.hot_bytes:
            config = replace(config, tiers=Tiering(given.hot_bytes, warm_bytes=1 << 40))
        uvloop.run(_plain(given, release, config, device, results))
    return results


async def _plain(
    given: argparse.Namespace, release: Release, config: ShardConfig, device: str, results: dict[str, Any]
) -> None:
    shard = Apart(serve, config, str(release.path), device)
    address, took_s = shard.hear(600)
    asker = Asker(release, [Peer("shard-0", address, meta={"shard": 0})], 1, N_PARTITIONS)
    await asker.ready()
    health = await asker.health()
    print(f"{device}: {health['device']}, {health['tables']}, ready after {took_s:.1f} s")
    results[f"{device}, start s"] = took_s
    await asker.check()
    show(results, f"{device}, {KEYS} keys, idle", await timed(asker.rows, given.seconds))
    show(results, f"{device}, recall of 500", await timed(asker.recall, given.seconds))
    asked = (await asker.wire.call("snapshot", args={"full": True}, deadline=Deadline.after(30))).args["number"]
    start_s = time.perf_counter()
    during: list[float] = []
    while (await asker.health())["snapshot"]["answered"] < asked:
        during += (await timed(asker.rows, 0.5))[1:]
    results[f"{device}, snapshot s"] = time.perf_counter() - start_s
    if during:
        show(results, f"{device}, {KEYS} keys while a snapshot is taken", during)
    print(f"{device}: snapshot of {health['tables']['item']['rows']} rows in {time.perf_counter() - start_s:.1f} s")
    stream = Apart(produce, config.bootstrap, config.topic, release.manifest.generation, given.dim, given.rows_per_s)
    stream.hear()
    before, start_s = (await asker.health())["counters"], time.perf_counter()
    show(results, f"{device}, {KEYS} keys, rows applied", await timed(asker.rows, given.seconds))
    after = (await asker.health())["counters"]
    applied = sum(after[name] - before[name] for name in ("applied", "stale")) / (time.perf_counter() - start_s)
    results[f"{device}, rows applied per s"] = applied
    print(f"{device}: {applied / 1e3:.0f} k rows/s applied meanwhile")
    stream.end()
    await asker.wire.close()
    shard.end()
    again = Apart(serve, config, str(release.path), device)
    _, took_s = again.hear(600)
    print(f"{device}: ready again after {took_s:.1f} s")
    results[f"{device}, restart s"] = took_s
    again.end()


def snapshot(given: argparse.Namespace, release: Release, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """One shard without Ray, and one snapshot of all its rows."""
    results: dict[str, Any] = {}
    ensure_topics(broker.bootstrap, {"snapshot": N_PARTITIONS, "dead": 1})
    config = shard_config(folder / "snapshot", broker.bootstrap, "snapshot")
    uvloop.run(_snapshot(given, release, config, results))
    return results


async def _snapshot(given: argparse.Namespace, release: Release, config: ShardConfig, results: dict[str, Any]) -> None:
    shard = Apart(serve, config, str(release.path), given.device)
    address, took_s = shard.hear(600)
    asker = Asker(release, [Peer("shard-0", address, meta={"shard": 0})], 1, N_PARTITIONS)
    await asker.ready()
    health = await asker.health()
    print(f"{given.device}: {health['device']}, {health['tables']}, ready after {took_s:.1f} s", flush=True)
    await asker.check()
    idle = await timed(asker.rows, given.seconds)
    show(results, f"{given.device}, {KEYS} keys, idle", idle)
    asked = (await asker.wire.call("snapshot", args={"full": True}, deadline=Deadline.after(30))).args["number"]
    start_s, during = time.perf_counter(), []
    while (await asker.health())["snapshot"]["answered"] < asked:
        during += (await timed(asker.rows, 0.5))[1:]
    results["snapshot s"] = time.perf_counter() - start_s
    show(results, f"{given.device}, {KEYS} keys while a snapshot is taken", during)
    gb = given.rows * given.dim * 4 / 1e9
    ratio = float(np.percentile(during, 99) / np.percentile(idle, 99))
    print(f"{gb:.1f} GB of rows in {results['snapshot s']:.1f} s; p99 of lookups {ratio:.2f} x idle")
    await asker.wire.close()
    shard.end()


def under_ray(given: argparse.Namespace, release: Release, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """The shards of a stack as actors, one of them killed."""
    import ray

    from param_server.actor import start_shards, stop_shards

    settings = Settings(
        home=folder / "home", release=release.path, shards=given.shards, shard_replicas=given.replicas,
        partitions=N_PARTITIONS, shard_device=given.device if given.device == "cpu" else "auto",
        gpus_per_shard=0.0 if given.device == "cpu" else given.gpus_per_shard, table_min_capacity_rows=1,
    )  # fmt: skip
    ensure_topics(broker.bootstrap, {settings.embeddings_topic: N_PARTITIONS, settings.deadletter_topic: 1})
    redis = EmbeddedRedis(folder / "redis")
    redis.start()
    ray.init(
        address="local", namespace=settings.stack, num_cpus=64, include_dashboard=False, log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )  # fmt: skip
    results: dict[str, Any] = {}
    try:
        redis.wait_ready()
        start_s = time.perf_counter()
        handles = start_shards(settings, release.path, redis.url, broker.bootstrap)
        results["start s"] = time.perf_counter() - start_s
        print(f"{len(handles)} shard processes serve after {results['start s']:.1f} s")
        uvloop.run(_under_ray(given, release, settings, redis.url, results))
        stop_shards(handles)
    finally:
        ray.shutdown()
        redis.stop()
    return results


async def _under_ray(
    given: argparse.Namespace, release: Release, settings: Settings, redis_url: str, results: dict[str, Any]
) -> None:
    def peers() -> list[Peer]:
        entries = read_directory(redis_url, settings.stack)
        return [Peer(e.name, e.address, "", {**e.meta, "pid": e.pid}) for e in entries if e.role == "shard"]

    while len(found := peers()) < settings.shards * settings.shard_replicas:
        await asyncio.sleep(0.05)
    asker = Asker(release, found, settings.shards, N_PARTITIONS)
    await asker.ready()
    for peer in asker.wire.peers():
        health = (await asker.wire.call("health", deadline=Deadline.after(30), peer=peer.name)).args
        print(f"shard {health['index']} replica {health['replica']}: {health['device']}, {health['tables']}")
    await asker.check()
    show(results, f"{given.shards} shards, {KEYS} keys, idle", await timed(asker.rows, given.seconds))
    os.kill(found[0].meta["pid"], signal.SIGKILL)
    start_s, degraded, total = time.perf_counter(), 0, 0
    while True:
        got = await asker.rows(total)
        total += 1
        degraded += bool(got.missing_shards)
        alive = {peer.name for peer in peers()}
        if got.found[0].all() and found[0].name not in alive and len(alive) == len(found):
            break
        asker.wire.set_peers(peers())
        await asyncio.sleep(0.005)
    await asker.check()
    results["whole again s"], results["degraded"], results["lookups"] = time.perf_counter() - start_s, degraded, total
    print(f"kill -9 of one: whole again after {results['whole again s']:.1f} s; {degraded} of {total} lookups degraded")
    await asker.wire.close()


PARTS = {"plain": plain, "snapshot": snapshot, "ray": under_ray}


def main() -> None:
    """Measure what is asked for."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.gpu_shard", description=__doc__)
    options.add_argument("what", choices=list(PARTS), nargs="+")
    options.add_argument("--device", default="cuda", help="cuda, cuda:n or cpu")
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--rows-per-s", type=int, default=500_000)
    options.add_argument("--hot-bytes", type=int, default=0, help="plain: only so much of it on the device")
    options.add_argument("--shards", type=int, default=2)
    options.add_argument("--replicas", type=int, default=1)
    options.add_argument("--gpus-per-shard", type=float, default=0.25)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {given.rows} rows of {given.dim} f32")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        folder = Path(name)
        release = make_release(folder / "release", given.rows, given.dim)
        broker = EmbeddedBroker(folder / "broker")
        broker.start()
        try:
            broker.wait_ready()
            for what in given.what:
                results[what] = PARTS[what](given, release, broker, folder)
        finally:
            broker.stop()
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
