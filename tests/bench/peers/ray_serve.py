"""Peer (a): the same models and rows, composed plainly on Ray Serve deployment handles with its optimisations on.

    HTTP -> HAProxy -> Ingress (FastAPI; history from Redis) -> Embeddings -> Edge -> Rerank

Written as Ray Serve's performance guide says: HAProxy and the throughput-optimised mode, by-value gRPC handles,
`serve.batch` on the models, `max_ongoing_requests` far above what is in flight, asynchronous code everywhere. The
models run on the same ONNX Runtime engine as the product's, one thread a replica. `python -m
tests.bench.peers.ray_serve --release DIR --port N` serves until SIGTERM.
"""

# No `from __future__ import annotations`: FastAPI evaluates them again in the replica, without this module's names.

from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio
from fastapi import FastAPI
from numpy.typing import NDArray
from ray import serve
from ray.serve.handle import DeploymentHandle

from feature_service.schema import ModelInputs, recall_query
from infra.engine.batch import Features, pad, unpad
from infra.engine.onnx_cpu import OnnxEngine
from infra.release import read_release
from tests.bench.peers.answers import Answer, Answers, Ask, Stopwatch, UserKind
from tests.bench.peers.features import RERANK_DEPTH, PeerFeatures, best_first, user_kind
from tests.bench.peers.redis_rows import history_key, read_history

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
# Tried on 2 cores: by-value gRPC handles are twice as fast as by-reference ones; batches of 8 or 32, a second ingress
# replica, models in a thread pool, or Embeddings calling the models itself gain nothing.
MAX_BATCH = 16
MAX_ONGOING = 256

api = FastAPI()


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class Embeddings:
    """Rows of all tables in memory: recall, and the model inputs of one request."""

    def __init__(self, release: str) -> None:
        self._features = PeerFeatures(Path(release))
        self._users = self._features.user_vectors()

    async def inputs(self, user_id: str | None, keys: I64, ts_us: I64) -> tuple[UserKind, I64, ModelInputs]:
        """Kind of user, indices i64[N] of the recalled items, and what the models take."""
        features, items = self._features, self._features.items
        user, own_row = self._users.get(user_id or "") or (features.bucket_vector(user_id), False)
        seen = features.indices(keys)
        history = items.tokens[seen]
        query = recall_query(user, history[:, : features.schema.item_dim])
        recalled = features.recall(query, seen)
        hist, mask = features.history_tokens(history, ts_us)
        return user_kind(user_id, own_row), recalled, ModelInputs(hist, items.tokens[recalled], mask, user)


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class Ranker:
    """One model on ONNX Runtime, batched."""

    def __init__(self, model: str) -> None:
        self._engine = OnnxEngine(model)
        self._engine.load()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.0)
    async def score(self, requests: list[ModelInputs]) -> list[F32]:
        """Logits f32[N] of each request."""
        batch = pad([Features(r.hist, r.target, r.mask, r.user) for r in requests])
        scores = self._engine.run(batch.hist, batch.target, batch.mask, batch.user)
        return unpad(scores, [r.target.shape[0] for r in requests])


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
@serve.ingress(api)
class Ingress:
    """The HTTP endpoint and the order of the stages."""

    def __init__(
        self,
        release: str,
        redis_url: str,
        embeddings: DeploymentHandle[Any],
        edge: DeploymentHandle[Any],
        rerank: DeploymentHandle[Any],
    ) -> None:
        manifest = read_release(Path(release), verify_files=False).manifest
        self._answers = Answers(manifest, PeerFeatures(Path(release)).items.ids)
        self._redis = redis.asyncio.Redis.from_url(redis_url)
        self._embeddings = embeddings
        self._edge = edge
        self._rerank = rerank

    @api.post("/v1/recommend")
    async def recommend(self, ask: Ask) -> Answer:
        """500 recalled, 100 reranked, k returned."""
        stopwatch = Stopwatch()
        user_id = None if ask.user_id is None else str(ask.user_id)
        events = [] if user_id is None else await self._redis.lrange(history_key(user_id), 0, -1)
        stopwatch.lap("features")
        user, recalled, inputs = await self._embeddings.inputs.remote(user_id, *read_history(events))
        stopwatch.lap("embeddings")
        edge_logits = await self._edge.score.remote(inputs)
        chosen = best_first(edge_logits, RERANK_DEPTH)
        stopwatch.lap("edge")
        logits = await self._rerank.score.remote(inputs.only(chosen))
        best = best_first(logits, ask.k)
        stopwatch.lap("rerank")
        return self._answers.make(
            ask, recalled[chosen[best]], logits[best], n_candidates=recalled.size, user=user, stopwatch=stopwatch
        )

    @api.get("/readyz")
    async def ready(self) -> dict[str, bool]:
        """Whether requests are answered."""
        return {"ready": True}


def application(release: Path, redis_url: str) -> serve.Application:
    """The four deployments, wired."""
    found = read_release(release)
    return Ingress.bind(  # type: ignore[no-any-return]
        str(release),
        redis_url,
        Embeddings.bind(str(release)),
        Ranker.options(name="Edge").bind(str(found.edge_model)),
        Ranker.options(name="Rerank").bind(str(found.rerank_model)),
    )
