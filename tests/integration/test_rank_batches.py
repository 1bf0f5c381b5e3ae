"""How large the batches of a replica are: as large as the engine in use likes, on a GPU in buckets with little padding.

The GPU is `tests.fake_cuda`: the runner's own lanes, buffers and graphs, with ONNX Runtime as the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from edge_ranker import rank_server
from edge_ranker.rank_server import RankServer, RankServerConfig
from infra.deadline import Deadline
from infra.embedded import EmbeddedRedis
from infra.engine.batch import Batching, Padded
from infra.engine.bucketed import BucketedEngine
from infra.engine.choose import Offer
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.rank import RankHandler
from infra.engine.run import Engine
from infra.errors import Permanent
from infra.release import Release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from infra.wire.messages import Reply, Request
from tests.fake_cuda import FakeSession
from tests.support import eventually
from tests.tiny_release import SCHEMA, write_tiny_release

WIDTHS = SCHEMA.token_dim, SCHEMA.user_dim
GPU, CPU = "tensorrt:fp16", "onnxruntime-cpu:fp32"


class Watched:
    """An engine that notes the requests of each run, waits at `gate`, and raises when it is told to."""

    def __init__(
        self, engine: Engine, seen: list[tuple[str, int]], gate: threading.Event, *, broken: list[bool]
    ) -> None:
        self.kind, self.precision, self.batching = engine.kind, engine.precision, engine.batching
        self.load, self.close, self.memory_bytes = engine.load, engine.close, engine.memory_bytes
        self._engine, self._seen, self._gate, self._broken = engine, seen, gate, broken

    def run(self, hist: np.ndarray, target: np.ndarray, mask: np.ndarray, user: np.ndarray) -> np.ndarray:
        self._seen.append((self.kind, hist.shape[0]))
        self._gate.wait(30)
        if self._broken and self.kind == "tensorrt":
            raise Permanent("the GPU fell off the bus")
        return self._engine.run(hist, target, mask, user)


class WideOnnx(OnnxEngine):
    """ONNX Runtime on a CPU that likes larger batches."""

    batching: Batching = Padded(20, 4096)


class Replica:
    """A reranker's replica in this process whose engines wait at `gate`."""

    def __init__(self, release: Release, redis: str, run_dir: Path, offers: Sequence[Offer], **limits: int) -> None:
        self.seen: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: list[bool] = []
        watched = [Offer(o.kind, o.precision, partial(self._watched, o), o.heavy) for o in offers]
        names = tuple(o.name for o in offers)
        config = RankServerConfig("rerank", str(release.path), redis, "batches", str(run_dir), engines=names, **limits)
        self.server = RankServer(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_server, "offers_of", lambda *_: watched)
            self.address = self.server.start()

    def _watched(self, offer: Offer) -> Engine:
        return Watched(offer.make(), self.seen, self.gate, broken=self.broken)

    def runs(self, n: int, *, until: tuple[str, int]) -> list[tuple[str, int]]:
        """The runs for 40 requests of `n` candidates that arrive during another one, again and again until one of them
        is `until`: how many have arrived when the engine is free is up to the machine. Every score is checked."""
        found: list[tuple[str, int]] = []

        def once() -> bool:
            found.extend(asyncio.run(self._runs(n)))
            return until in found

        eventually(once, timeout_s=60.0)
        return found

    async def _runs(self, n: int) -> list[tuple[str, int]]:
        client = WireClient(role="rerank")
        client.set_peers([Peer("rerank-0", self.address, "", {})])
        await client.wait_live(deadline=Deadline.after(10))
        self.gate.clear()
        self.seen.clear()
        first = asyncio.create_task(ask(client, 0, n))
        await asyncio.to_thread(eventually, lambda: self.seen)
        others = [asyncio.create_task(ask(client, seed, n)) for seed in range(1, 41)]
        # One turn for each to send, one for the socket.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.gate.set()
        await asyncio.gather(first, *others)
        await client.close()
        return self.seen[1:]


async def ask(client: WireClient, seed: int, n: int) -> None:
    tensors = request(np.random.default_rng(seed), 10, n).tensors
    reply = await client.call("rank", tensors=tensors, deadline=Deadline.after(30))
    np.testing.assert_allclose(reply.tensors["scores"], formula(tensors), atol=1e-3)


def request(rng: np.random.Generator, length: int, n: int) -> Request:
    hist, target = (rng.standard_normal((size, SCHEMA.token_dim), np.float32) for size in (length, n))
    user = rng.standard_normal(SCHEMA.user_dim, np.float32)
    mask = np.ones(length, np.float32)
    return Request("rank", tensors={"hist": hist, "target": target, "mask": mask, "user": user})


def formula(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What the tiny reranker computes."""
    hist = tensors["hist"]
    scores: np.ndarray = 3 * (tensors["target"] @ (hist.sum(0) / (hist.shape[0] + 1)) + tensors["user"].sum())
    return scores


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    server.wait_ready()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return write_tiny_release(tmp_path_factory.mktemp("release") / "r")


def on_gpu(release: Release) -> BucketedEngine:
    return BucketedEngine("tensorrt", "fp16", lambda grid: FakeSession(release.rerank_model, WIDTHS, grid))


def offers(release: Release) -> list[Offer]:
    """A GPU, and a CPU to fall back on."""
    return [
        Offer("tensorrt", "fp16", lambda: on_gpu(release)),
        Offer("onnxruntime-cpu", "fp32", lambda: OnnxEngine(release.rerank_model)),
    ]


def test_a_gpu_sees_32_users_at_once_and_the_cpu_that_takes_over_eight(
    release: Release, redis: str, tmp_path: Path
) -> None:
    replica = Replica(release, redis, tmp_path, offers(release))
    try:
        on_the_gpu = replica.runs(200, until=("tensorrt", 32))
        replica.broken.append(True)
        asyncio.run(replica._runs(100))
        on_the_cpu = replica.runs(100, until=("onnxruntime-cpu", 8))
    finally:
        replica.gate.set()
        replica.server.stop()

    assert {kind for kind, _ in on_the_gpu} == {"tensorrt"}
    assert max(size for _, size in on_the_gpu) == 32
    assert {kind for kind, _ in on_the_cpu} == {"onnxruntime-cpu"}
    assert max(size for _, size in on_the_cpu) == 8


def test_a_cpu_engine_that_likes_larger_batches_gets_them(release: Release, redis: str, tmp_path: Path) -> None:
    wide = [Offer("onnxruntime-cpu", "fp32", lambda: WideOnnx(release.rerank_model))]
    replica = Replica(release, redis, tmp_path, wide)
    try:
        runs = replica.runs(100, until=("onnxruntime-cpu", 20))
    finally:
        replica.gate.set()
        replica.server.stop()

    assert max(size for _, size in runs) == 20


def test_a_setting_limits_what_the_engine_likes(release: Release, redis: str, tmp_path: Path) -> None:
    replica = Replica(release, redis, tmp_path, offers(release), max_requests=10, max_rows=1000)
    try:
        many = replica.runs(50, until=("tensorrt", 10))
        long = replica.runs(200, until=("tensorrt", 5))
    finally:
        replica.gate.set()
        replica.server.stop()

    assert max(size for _, size in many) == 10
    assert max(size for _, size in long) == 5


@pytest.mark.parametrize(
    ("tier", "sizes"),
    [("edge", (500,)), ("rerank", (100,)), ("own lists of 20 to 500", tuple(range(20, 501)))],
)
def test_on_a_gpu_a_mix_of_lengths_like_movielens_wastes_less_than_30_percent(
    release: Release, tier: str, sizes: tuple[int, ...]
) -> None:
    """Two thirds of its users have a full history of 50, the others any length; batches of 1 to 32 have formed."""
    engine, rng = on_gpu(release), np.random.default_rng(5)
    engine.load()
    handler = RankHandler(engine, "", token_dim=WIDTHS[0], user_dim=WIDTHS[1], role="rerank")
    before = np.array(counted())
    for _ in range(25):
        requests = [
            request(rng, 50 if rng.random() < 2 / 3 else int(rng.integers(1, 50)), int(rng.choice(sizes)))
            for _ in range(int(rng.integers(1, handler.max_batch() + 1)))
        ]
        assert all(isinstance(answer, Reply) for answer in handler.handle(requests))
    real, padding = np.array(counted()) - before
    engine.close()

    share = padding / (real + padding)
    print(f"{tier}: {share:.3f} of the cells are padding")
    assert 0 < share < 0.30


def counted() -> tuple[float, float]:
    """Real cells and padding so far."""
    values = (
        REGISTRY.get_sample_value("engine_cells_total", {"role": "rerank", "kind": kind})
        for kind in ("real", "padding")
    )
    real, padding = (value or 0.0 for value in values)
    return real, padding
