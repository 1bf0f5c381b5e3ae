"""A replica whose engine dies, is damaged or gives NaN answers every request, rightly, with the next engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_ranker.rank_server import RankServer, RankServerConfig
from infra.deadline import Deadline
from infra.directory import Entry, read_directory
from infra.embedded import EmbeddedRedis
from infra.errors import PeerGone, Permanent, TrirankError
from infra.release import Release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from tests.onnx_models import write_ranker
from tests.support import eventually
from tests.tiny_release import SCHEMA, write_tiny_release

INT8, FP32 = "onnxruntime-cpu:int8", "onnxruntime-cpu:fp32"
STACK = "faults"
CALLERS = 6


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_tiny_release(tmp_path / "r", int8=True)


class Replica:
    """A replica of the reranker, in this process, and callers that never pause."""

    def __init__(self, release: Release, redis_url: str, run_dir: Path) -> None:
        config = RankServerConfig(
            role="rerank",
            release_dir=str(release.path),
            redis_url=redis_url,
            stack=STACK,
            run_dir=str(run_dir),
            engine_dir=str(run_dir / "engines"),
            engines=(INT8, FP32),
        )
        self.server = RankServer(config)
        self.address = self.server.start()
        self._redis_url = redis_url
        self.answered_by: list[str] = []
        self.failed: list[TrirankError] = []
        self._quiet = threading.Event()
        self._callers = threading.Thread(target=lambda: asyncio.run(self._call()))

    def __enter__(self) -> Replica:
        self._callers.start()
        eventually(lambda: len(self.answered_by) >= 5 * CALLERS)
        return self

    def __exit__(self, *_: object) -> None:
        self._quiet.set()
        self._callers.join()
        self.server.stop()

    @property
    def engines(self) -> list:  # type: ignore[type-arg]
        """The engines that may answer now, best first."""
        return [member.engine for member in self.server._engines._keeper.rotation]  # type: ignore[union-attr]

    def answers_from(self, engine: str) -> None:
        """Wait until only this engine answers, for a while and under load."""
        eventually(lambda: set(self.answered_by[-10 * CALLERS :]) == {engine})

    def entry(self) -> Entry:
        """What the directory says of this replica."""
        return next(e for e in read_directory(self._redis_url, STACK) if e.address == self.address)

    async def _call(self) -> None:
        client = WireClient(role="rerank")
        client.set_peers([Peer("rerank-0", self.address, "", {})])
        await client.wait_live(deadline=Deadline.after(10))
        await asyncio.gather(*(self._caller(client, seed) for seed in range(CALLERS)))
        await client.close()

    async def _caller(self, client: WireClient, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._quiet.is_set():
            tensors, expected = request(rng)
            try:
                reply = await client.call("rank", tensors=tensors, deadline=Deadline.after(20))
            except TrirankError as error:
                self.failed.append(error)
                continue
            if np.allclose(reply.tensors["scores"], expected, atol=1e-3):
                self.answered_by.append(reply.args["engine"])
            else:
                self.failed.append(Permanent("scores are wrong"))


def request(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A request of any shape, and the scores that the formula of the tiny reranker gives it."""
    length, n = int(rng.integers(1, 12)), int(rng.integers(1, 30))
    hist, target = (rng.standard_normal((size, SCHEMA.token_dim), np.float32) for size in (length, n))
    user = rng.standard_normal(SCHEMA.user_dim, np.float32)
    expected = 3 * (target @ (hist.sum(0) / (length + 1)) + user.sum())
    return {"hist": hist, "target": target, "mask": np.ones(length, np.float32), "user": user}, expected


def not_finite(path: Path) -> None:
    """A model whose weights went bad: every score is NaN."""
    write_ranker(path, SCHEMA.token_dim, SCHEMA.user_dim, scale=float("nan"))


def flipped(path: Path) -> None:
    """A file of which one weight has changed."""
    whole = path.read_bytes()
    at = whole.index(np.float32(3.0).tobytes())
    path.write_bytes(whole[:at] + np.float32(3.5).tobytes() + whole[at + 4 :])


def cut(path: Path) -> None:
    """Half a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [not_finite, flipped, cut, Path.unlink])
def test_a_file_damaged_after_it_was_verified_is_not_served(
    release: Release, redis: EmbeddedRedis, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(release.path / "rerank/bst.int8-cpu.onnx")

    with Replica(release, redis.url, tmp_path / "run") as replica:
        replica.answers_from(FP32)
        entry = eventually(replica.entry)

    assert replica.failed == []
    assert set(replica.answered_by) == {FP32}
    assert (entry.meta["engine"], entry.meta["precision"]) == ("onnxruntime-cpu", "fp32")
    assert list(entry.meta["engines_refused"]) == [INT8]


@pytest.mark.parametrize("damage", [not_finite, cut, Path.unlink])
def test_an_engine_that_dies_under_load_and_cannot_be_had_again_is_replaced_and_no_request_fails(
    release: Release, redis: EmbeddedRedis, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Replica(release, redis.url, tmp_path / "run") as replica:
        replica.answers_from(INT8)
        damage(release.path / "rerank/bst.int8-cpu.onnx")
        replica.engines[0].close()

        replica.answers_from(FP32)
        entry = eventually(lambda: (e := replica.entry()).meta["precision"] == "fp32" and e)
        replica.server.check()

    assert replica.failed == []
    assert entry.meta["engines_ready"] == [FP32]


def test_an_engine_that_was_repaired_serves_again_after_its_pause(
    release: Release, redis: EmbeddedRedis, tmp_path: Path
) -> None:
    model = release.path / "rerank/bst.int8-cpu.onnx"
    whole = model.read_bytes()
    with Replica(release, redis.url, tmp_path / "run") as replica:
        not_finite(model)
        replica.engines[0].close()
        replica.answers_from(FP32)

        model.write_bytes(whole)
        replica.answers_from(INT8)

    assert replica.failed == []


def test_when_both_engines_die_at_once_one_is_opened_afresh_and_no_request_fails(
    release: Release, redis: EmbeddedRedis, tmp_path: Path
) -> None:
    with Replica(release, redis.url, tmp_path / "run") as replica:
        first, second = replica.engines
        for engine in (first, second):
            not_finite(release.path / "rerank/bst.int8-cpu.onnx")
            engine.load = _lost
            engine.close()

        replica.answers_from(FP32)

    assert replica.failed == []


def _lost() -> None:
    raise RuntimeError("the library has lost its device")


def test_a_replica_whose_engine_does_not_come_back_asks_to_be_replaced(
    release: Release, redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_ranker.rank_server.STUCK_S", 0.05)
    hangs = threading.Event()
    with Replica(release, redis.url, tmp_path / "run") as replica:
        replica.server.check()
        engine = replica.engines[0]
        run = engine.run
        engine.run = lambda *batch: (hangs.wait(20), run(*batch))[1]

        eventually(lambda: _refuses(replica.server))
        hangs.set()
        eventually(lambda: not _refuses(replica.server))

    assert replica.failed == []


def _refuses(server: RankServer) -> bool:
    try:
        server.check()
    except PeerGone as error:
        return "a run has lasted" in str(error)
    return False
