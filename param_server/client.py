"""Rows and recall from all shards, in one call to each; imports nothing compiled, so that gateways stay light.

The only error a caller sees is a deadline that is over before the start. A shard that is gone, late or full is answered
for with default rows and named in `missing_shards`: the caller decides what a degraded answer is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from infra.deadline import Deadline
from infra.errors import DeadlineExceeded, TrirankError
from infra.wire.client import WireClient
from infra.wire.messages import Reply
from param_server import metrics
from param_server.contract import F32, I64, TableSpec
from param_server.routing import shard_of

logger = logging.getLogger(__name__)

Bool = NDArray[np.bool_]
_CAUSES = {"DeadlineExceeded": "late", "PeerGone": "gone", "Overloaded": "full"}


@dataclass(frozen=True, slots=True)
class PoolTerm:
    """One part of a recall query: the sum or mean of the rows of `lookup`, defaults included.

    With `unless_found`, the term counts only when the first key of that lookup was not found; and then that other
    lookup's term does not count: one stands in for the other.
    """

    lookup: int
    how: Literal["sum", "mean"]
    unless_found: int | None = None


@dataclass(frozen=True, slots=True)
class TopkQuery:
    """A recall of `k` rows of `table` without the keys `exclude` i64[].

    The query vector is made of looked-up rows: by `pool` in the shard while there is only one, else by
    `combine(rows, found)` here. Both must say the same.
    """

    table: str
    k: int
    exclude: I64
    pool: tuple[PoolTerm, ...]
    combine: Callable[[Sequence[F32], Sequence[Bool]], F32]


@dataclass(frozen=True, slots=True)
class TopkResult:
    """Best first, equal scores by key: keys i64[k'], scores f32[k'], rows f32[k', dim]."""

    keys: I64
    scores: F32
    rows: F32


@dataclass(frozen=True, slots=True)
class FetchResult:
    """rows f32[n, dim] and found bool[n] of each lookup; `topk` None when not asked for or no shard answered.

    `watermark_us` is the oldest of the shards that answered, 0 when none did.
    """

    rows: list[F32]
    found: list[Bool]
    topk: TopkResult | None
    watermark_us: int
    missing_shards: tuple[int, ...]


class ParameterClient:
    """Peers of `wire` carry `meta["shard"]`. Tensors that come back may be read-only views of what was received."""

    def __init__(self, wire: WireClient, n_shards: int, n_partitions: int, specs: Mapping[str, TableSpec]) -> None:
        self._wire = wire
        self._n_shards = n_shards
        self._n_partitions = n_partitions
        self._specs = specs

    async def fetch(
        self,
        *,
        generation: int,
        lookups: Sequence[tuple[str, I64]],
        topk: TopkQuery | None,
        deadline: Deadline,
        trace_id: str = "",
    ) -> FetchResult:
        """Look up keys i64[n] per (table, keys), duplicates too. Raises DeadlineExceeded only when it is over now."""
        if deadline.remaining_s() <= 0:
            raise DeadlineExceeded("the deadline is over before the rows are asked for")
        call = _Call(generation, deadline, trace_id)
        if self._n_shards == 1:
            return await self._fetch_one(call, lookups, topk)
        return await self._fetch_many(call, lookups, topk)

    async def _fetch_one(self, call: _Call, lookups: Sequence[tuple[str, I64]], topk: TopkQuery | None) -> FetchResult:
        args, tensors = _lookup_parts(lookups)
        if topk is not None:
            pool = [[t.lookup, t.how, -1 if t.unless_found is None else t.unless_found] for t in topk.pool]
            args["topk"] = {"table": topk.table, "k": topk.k, "pool": pool}
            tensors["exclude"] = topk.exclude
        reply = await self._ask(0, call, args, tensors)
        if reply is None:
            rows, found = self._defaults(lookups)
            return FetchResult(rows, found, None, 0, (0,))
        rows = [reply.tensors[f"r{i}"] for i in range(len(lookups))]
        found = [reply.tensors[f"f{i}"].view(np.bool_) for i in range(len(lookups))]
        best = None if topk is None else _topk_of(reply)
        return FetchResult(rows, found, best, reply.args["watermark_us"], ())

    async def _fetch_many(self, call: _Call, lookups: Sequence[tuple[str, I64]], topk: TopkQuery | None) -> FetchResult:
        rows, found = self._defaults(lookups)
        owners = [shard_of(keys, self._n_partitions, self._n_shards) for _, keys in lookups]
        parts = {shard: [np.flatnonzero(owner == shard) for owner in owners] for shard in range(self._n_shards)}
        asked = [shard for shard, at in parts.items() if any(a.size for a in at)]
        replies = await asyncio.gather(*(self._ask(s, call, *_lookup_parts(lookups, parts[s])) for s in asked))
        answered = {shard: reply for shard, reply in zip(asked, replies, strict=True) if reply is not None}
        for shard, reply in answered.items():
            for i, at in enumerate(parts[shard]):
                rows[i][at] = reply.tensors[f"r{i}"]
                found[i][at] = reply.tensors[f"f{i}"].view(np.bool_)
        missing = set(asked) - answered.keys()
        watermarks = [reply.args["watermark_us"] for reply in answered.values()]
        best: TopkResult | None = None
        if topk is not None:
            recalls = await self._recall(call, topk, topk.combine(rows, found))
            missing |= {shard for shard, reply in enumerate(recalls) if reply is None}
            whole = [reply for reply in recalls if reply is not None]
            watermarks += [reply.args["watermark_us"] for reply in whole]
            best = _best_of([_topk_of(reply) for reply in whole], topk.k) if whole else None
        return FetchResult(rows, found, best, min(watermarks, default=0), tuple(sorted(missing)))

    async def _recall(self, call: _Call, topk: TopkQuery, query: F32) -> list[Reply | None]:
        args = {"tables": [], "topk": {"table": topk.table, "k": topk.k, "pool": None}}
        vector: np.ndarray[Any, Any] = np.ascontiguousarray(query, np.float32)
        tensors = {"query": vector, "exclude": topk.exclude}
        return await asyncio.gather(*(self._ask(s, call, args, tensors) for s in range(self._n_shards)))

    async def _ask(
        self, shard: int, call: _Call, args: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]
    ) -> Reply | None:
        """Ask one replica of a shard, the same for all of a request; another one if it dies or is full."""
        cause = "gone"
        tried: set[str] = set()
        while (peer := call.replicas.get(shard) or self._pick(shard, tried)) is not None:
            call.replicas[shard] = peer
            try:
                return await self._wire.call(
                    "fetch",
                    args={"generation": call.generation, **args},
                    tensors=tensors,
                    deadline=call.deadline,
                    trace_id=call.trace_id,
                    peer=peer,
                )
            except TrirankError as error:
                cause = _CAUSES.get(type(error).__name__, "failed")
                if cause == "failed":
                    logger.warning("a shard refused a fetch", extra={"shard": shard, "error": error})
                tried.add(call.replicas.pop(shard))
                if cause not in ("gone", "full"):
                    break
        metrics.CLIENT_MISSING.labels(cause).inc()
        return None

    def _pick(self, shard: int, tried: Collection[str]) -> str | None:
        """The less busy of two live replicas of a shard, taken at random."""
        live = [p for p in self._wire.peers() if p.live and p.meta.get("shard") == shard and p.name not in tried]
        if len(live) > 1:
            live = random.sample(live, 2)
        return min(live, key=lambda p: p.in_flight).name if live else None

    def _defaults(self, lookups: Sequence[tuple[str, I64]]) -> tuple[list[F32], list[Bool]]:
        rows = [np.tile(self._specs[table].default_row, (keys.size, 1)) for table, keys in lookups]
        return rows, [np.zeros(keys.size, np.bool_) for _, keys in lookups]


@dataclass(frozen=True, slots=True)
class _Call:
    """`replicas` are those that this request asks, by shard."""

    generation: int
    deadline: Deadline
    trace_id: str
    replicas: dict[int, str] = field(default_factory=dict)


def _lookup_parts(
    lookups: Sequence[tuple[str, I64]], chosen: Sequence[I64] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Arguments and tensors of a fetch of these lookups, or of the chosen positions of each."""
    tensors = {f"k{i}": keys if chosen is None else keys[chosen[i]] for i, (_, keys) in enumerate(lookups)}
    return {"tables": [table for table, _ in lookups], "topk": None}, tensors


def _topk_of(reply: Reply) -> TopkResult:
    return TopkResult(reply.tensors["tk_keys"], reply.tensors["tk_scores"], reply.tensors["tk_rows"])


def _best_of(parts: Sequence[TopkResult], k: int) -> TopkResult:
    keys = np.concatenate([part.keys for part in parts])
    scores = np.concatenate([part.scores for part in parts])
    best = np.lexsort((keys, -scores))[:k]
    return TopkResult(keys[best], scores[best], np.concatenate([part.rows for part in parts])[best])
