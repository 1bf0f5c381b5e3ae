"""A gateway with everything behind it, on a tiny release and without Ray: real Redis, broker, sockets and HTTP.

Each tier can be told to die, to be late, to fail or to talk nonsense.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_ranker.rank_server import bind_address
from feature_service.schema import schema_of
from feature_service.store import HistoryWriter
from infra.directory import Announcer, Entry
from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.rank import RankHandler
from infra.errors import RemoteFailure, TrirankError
from infra.release import Release
from infra.wire.messages import Hello, Reply, Request
from infra.wire.server import WireServer
from param_server.fetch import fetch_tensors
from param_server.generation import Generation, Place, empty_generation, fill_from_release
from reranker.gateway.config import GatewayConfig
from reranker.gateway.http import opened_app
from reranker.gateway.server import GatewayServer
from tests.support import eventually, free_port
from tests.tiny_release import write_tiny_release

STACK = "tiny"
FEEDBACK, LETTERS = "tiny.feedback", "tiny.deadletter"
PARTITIONS = 2
TOKEN = "for-operators"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (lower case) and decoded body of one reply."""

    status: int
    headers: dict[str, str]
    body: Any


class Tier:
    """One process of a tier, in a thread: a handler behind a socket, announced in the directory."""

    def __init__(
        self,
        role: str,
        number: int,
        release: Release,
        redis_url: str,
        run_dir: Path,
        handle: Callable[[Request], Reply],
        *,
        shard: int | None = None,
    ) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        self._handle = handle
        self._release = release
        self._redis_url = redis_url
        self._run_dir = run_dir
        self._shard = number if shard is None else shard
        self.requests: list[Request] = []
        self.damage: Callable[[Reply], Reply] = lambda reply: reply
        self.hold = threading.Event()
        self.hold.set()
        self._server: WireServer | None = None
        self._announcer: Announcer | None = None

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        """What the wire server calls."""
        self.requests.extend(requests)
        self.hold.wait(20)
        return [self.damage(self._handle(request)) for request in requests]

    def start(self) -> None:
        """Listen and announce."""
        manifest = self._release.manifest
        hello = Hello(self.role, self.name, manifest.name, manifest.generation, manifest.schema_fingerprint)
        bind = bind_address(self._run_dir, self.name)
        self._server = WireServer(bind=bind, hello=hello, handler=self, max_batch=8, max_queue=64)
        entry = Entry(
            self.role,
            self.name,
            self._server.start(),
            manifest.name,
            manifest.generation,
            os.getpid(),
            "here",
            {"shard": self._shard} if self.role == "shard" else {},
        )
        self._announcer = Announcer(self._redis_url, STACK, lambda: entry, 0.2)
        self._announcer.start()

    def die(self) -> None:
        """Close the socket; the directory still has the name, as after a kill."""
        self.hold.set()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def stop(self) -> None:
        """Leave the directory and close the socket."""
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        self.die()

    def revive(self) -> None:
        """Serve again under the same name."""
        self.stop()
        self.damage = lambda reply: reply
        self.start()


class GatewayStack:
    """Redis, a broker, one shard, one edge and one rerank replica, one gateway."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        self.release = write_tiny_release(directory / "release", poison=True)
        manifest = self.release.manifest
        self.schema = schema_of(manifest.schema, manifest.schema_fingerprint)
        self.redis = EmbeddedRedis(directory / "redis")
        self.broker = EmbeddedBroker(directory / "broker", topics={FEEDBACK: PARTITIONS, LETTERS: 1})
        self._run_dir = directory / "run"
        self._changed = changed
        self.generation = self._tables(self.release)
        self.tiers: dict[str, Tier] = {}
        self.more: list[Tier] = []
        self.port = free_port()
        self._server: GatewayServer | None = None

    def start(self) -> GatewayStack:
        """Start all and wait until the gateway is ready."""
        self.redis.start()
        self.broker.start()
        self.redis.wait_ready()
        self.broker.wait_ready()
        writer = HistoryWriter(self.redis.url, STACK, self.schema)
        writer.seed(self.release.users())
        writer.close()
        for role in ("shard", "edge", "rerank"):
            self.tiers[role] = self.tier(role, 0)
            self.tiers[role].start()
        self._server = GatewayServer("127.0.0.1", self.port, lambda: opened_app(self.config()))
        self._server.start()
        self.wait_ready()
        return self

    def stop(self) -> None:
        """Stop all."""
        if self._server is not None:
            self._server.stop()
        for tier in (*self.tiers.values(), *self.more):
            tier.stop()
        self.broker.stop()
        self.redis.stop()

    def tier(self, role: str, number: int, release: Release | None = None, *, shard: int | None = None) -> Tier:
        """One more process of a tier, of this release or another, not started."""
        served = release or self.release
        return Tier(role, number, served, self.redis.url, self._run_dir, self._handler(role, served), shard=shard)

    def config(self) -> GatewayConfig:
        """What the gateway is started with."""
        config = GatewayConfig(
            host="127.0.0.1",
            port=self.port,
            release_dir=str(self.release.path),
            stack=STACK,
            redis_url=self.redis.url,
            kafka=self.broker.bootstrap,
            embedded_redis=True,
            embedded_kafka=True,
            feedback_topic=FEEDBACK,
            shards=1,
            partitions=PARTITIONS,
            recall_k=40,
            rerank_depth=10,
            deadline_ms=2000.0,
            max_in_flight=16,
            attribution_key=b"k" * 32,
            control_token=TOKEN,
        )
        return replace(config, **self._changed)

    def wait_ready(self) -> None:
        """Wait until every dependency is well and the stages give whole answers."""
        eventually(lambda: self.get("/readyz").status == 200)
        eventually(lambda: self.recommend().body["degraded"]["value"] is False)

    def recommend(self, **body: Any) -> Answer:
        """POST /v1/recommend for the known user, or with what is given."""
        return self.post("/v1/recommend", {"user_id": "u1", **body})

    def rank(self, **body: Any) -> Answer:
        """POST /v1/rank for the known user, or with what is given."""
        return self.post("/v1/rank", {"user_id": "u1", **body})

    def get(self, path: str) -> Answer:
        """GET a path."""
        return self.ask("GET", path)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        """POST a body: JSON of it, or it as it is when it is bytes."""
        return self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            raw = reply.read()
        finally:
            connection.close()
        named = {k.lower(): v for k, v in reply.getheaders()}
        return Answer(reply.status, named, json.loads(raw) if "json" in named.get("content-type", "") else raw.decode())

    def _tables(self, release: Release) -> Generation:
        place = Place(0, 1, PARTITIONS)
        generation = empty_generation(release, place, headroom=2.0, min_capacity_rows=1024)
        fill_from_release(generation, release, place)
        return generation

    def _handler(self, role: str, release: Release) -> Callable[[Request], Reply]:
        if role == "shard":
            generation = self.generation if release is self.release else self._tables(release)
            return lambda request: _answer_of_shard(generation, request)
        engine = OnnxEngine(release.edge_model if role == "edge" else release.rerank_model)
        ranking = RankHandler(
            engine, release.manifest.name, token_dim=self.schema.token_dim, user_dim=self.schema.user_dim
        )

        def handle(request: Request) -> Reply:
            [answer] = ranking.handle([request])
            if isinstance(answer, TrirankError):
                raise answer
            return answer

        return handle


def _answer_of_shard(generation: Generation, request: Request) -> Reply:
    if request.method == "health":
        return Reply({"index": 0, "positions": {"0": 5}, "lag": {"0": 0}, "watermark_us": 7_000_000, "log_losses": 0})
    args = {"generation": generation.number, "watermark_us": 7_000_000, "applied_us": 0}
    return Reply(args, fetch_tensors({generation.number: generation}, request))


def broken(_: Reply) -> Reply:
    """Damage: the handler fails."""
    raise RemoteFailure("told to fail")


def not_finite(reply: Reply) -> Reply:
    """Damage: one score is NaN."""
    scores = reply.tensors["scores"].copy()
    scores[-1] = np.nan
    return Reply(reply.args, {"scores": scores})


def too_few(reply: Reply) -> Reply:
    """Damage: a score is missing."""
    return Reply(reply.args, {"scores": reply.tensors["scores"][1:]})
