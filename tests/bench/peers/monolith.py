"""Peer (b): one FastAPI and uvicorn process, rows in Redis, PyTorch eager. What a team builds first.

uvloop and httptools, hiredis, packed rows (one MGET reads all candidates), recall as a matrix-vector product in the
process, both models in inference mode, the BST in its shared form (ten times fewer operations than the paper's).
`python -m tests.bench.peers.monolith --release DIR --port N` serves until SIGTERM.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import redis.asyncio
import torch
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray

from feature_service.schema import ModelInputs, recall_query
from infra.embedded import EmbeddedRedis
from infra.lifecycle import on_stop_signals
from tests.bench.peers.answers import Answer, Answers, Ask, Stopwatch
from tests.bench.peers.arguments import parse
from tests.bench.peers.features import RERANK_DEPTH, PeerFeatures, best_first, user_kind
from tests.bench.peers.redis_rows import (
    history_key,
    item_key,
    read_history,
    read_user,
    seed_histories,
    seed_rows,
    user_key,
)
from tests.bench.peers.torch_models import load_models

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
# Measured on 2 cores: models in the event loop with one thread beat a pool of one or two workers (they and the loop
# fight for the interpreter) and two threads inside an operation (the operations are too small).
TORCH_THREADS = 1


class Recommender:
    """The whole request in one process."""

    def __init__(self, features: PeerFeatures, redis_url: str) -> None:
        schema, items = features.schema, features.items
        self._features = features
        self._edge, self._rerank = load_models(features.release, token_dim=schema.token_dim, user_dim=schema.user_dim)
        self._answers = Answers(features.release.manifest, items.ids)
        self._item_keys = [item_key(key) for key in items.keys.tolist()]
        self._no_row = items.tokens[-1].tobytes()
        self._redis = redis.asyncio.Redis.from_url(redis_url)

    async def recommend(self, ask: Ask) -> Answer:
        """500 recalled, 100 reranked, k returned."""
        stopwatch = Stopwatch()
        user_id = None if ask.user_id is None else str(ask.user_id)
        packed, events = await self._user(user_id)
        user, own_row = (self._features.bucket_vector(user_id), False) if packed is None else read_user(packed)
        keys, ts_us = read_history(events)
        history = await self._tokens([item_key(key) for key in keys.tolist()])
        stopwatch.lap("features")
        query = recall_query(user, history[:, : self._features.schema.item_dim])
        recalled = self._features.recall(query, self._features.indices(keys))
        target = await self._tokens([self._item_keys[i] for i in recalled.tolist()])
        hist, mask = self._features.history_tokens(history, ts_us)
        stopwatch.lap("embeddings")
        best, logits = self._rank(ModelInputs(hist, target, mask, user), ask.k)
        stopwatch.lap("rank")
        return self._answers.make(
            ask,
            recalled[best],
            logits,
            n_candidates=recalled.size,
            user=user_kind(user_id, own_row),
            stopwatch=stopwatch,
        )

    async def _user(self, user_id: str | None) -> tuple[bytes | None, list[bytes]]:
        if user_id is None:
            return None, []
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(user_key(user_id))
        pipeline.lrange(history_key(user_id), 0, -1)
        packed, events = await pipeline.execute()
        return packed, events

    async def _tokens(self, keys: list[bytes]) -> F32:
        """Candidate tokens f32[n, token_dim] of these Redis keys; writable."""
        rows = await self._redis.mget(keys) if keys else []
        packed = bytearray().join([self._no_row if row is None else row for row in rows])
        return np.frombuffer(packed, np.float32).reshape(len(keys), self._features.schema.token_dim)

    def _rank(self, inputs: ModelInputs, k: int) -> tuple[I64, F32]:
        """The k best candidates and their logits."""
        with torch.inference_mode():
            chosen = best_first(self._edge(*_tensors(inputs))[0].numpy(), RERANK_DEPTH)
            logits = self._rerank(*_tensors(inputs.only(chosen)))[0].numpy()
        best = best_first(logits, k)
        return chosen[best], logits[best]


def _tensors(inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
    parts = (inputs.hist, inputs.target, inputs.mask, inputs.user)
    return tuple(torch.from_numpy(part).unsqueeze(0) for part in parts)


def api(recommender: Recommender) -> FastAPI:
    """The HTTP endpoints."""
    app = FastAPI()

    @app.post("/v1/recommend")
    async def recommend(ask: Ask) -> Answer:
        return await recommender.recommend(ask)

    @app.get("/readyz")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    return app


def main() -> None:
    """Start Redis, fill it, serve; uvicorn stops at SIGTERM."""
    given = parse(__doc__)
    torch.set_num_threads(TORCH_THREADS)
    features = PeerFeatures(given.release)
    with tempfile.TemporaryDirectory(prefix="bench-monolith-", ignore_cleanup_errors=True) as directory:
        store = EmbeddedRedis(Path(directory))
        try:
            store.start()
            store.wait_ready()
            seed_histories(store.url, features)
            seed_rows(store.url, features)
            app = api(Recommender(features, store.url))
            # uvicorn raises the signal that stopped it once more; by then there is only this end left to do.
            on_stop_signals(lambda: None)
            uvicorn.run(
                app,
                host="127.0.0.1",
                port=given.port,
                loop="uvloop",
                http="httptools",
                access_log=False,
                log_level="warning",
            )
        finally:
            store.stop()


if __name__ == "__main__":
    main()
