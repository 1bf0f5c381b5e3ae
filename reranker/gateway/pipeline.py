"""The whole request, from query to reply: features, rows, edge, rerank.

At most three calls to other processes after Redis. Refuses nothing: a query is always answered with what the stages
that worked have given, and what is missing is named in `degraded`. Invariant: one release serves the request from end
to end.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from feature_service.resolver import ResolvedUser, Resolver
from feature_service.schema import ModelInputs
from infra.deadline import Deadline
from infra.errors import TrirankError
from reranker.gateway.catalogue import UNKNOWN
from reranker.gateway.degrade import F32, Scores, best_first, places
from reranker.gateway.embeddings import Embeddings, Fetched, Found
from reranker.gateway.metrics import CANDIDATES, DUPLICATES, UNNAMED, missing_rows
from reranker.gateway.query import Query
from reranker.gateway.ranker import Ranker
from reranker.gateway.registry import Registry
from reranker.gateway.replies import ReplyMaker
from reranker.gateway.schemas import RecommendReply
from reranker.gateway.trail import Trail
from reranker.gray.split import Assignment

RankStage = Literal["edge", "rerank"]


class Pipeline:
    """Answers queries with one release."""

    def __init__(
        self,
        *,
        resolver: Resolver,
        registry: Registry,
        embeddings: Embeddings,
        edge: Ranker,
        rerank: Ranker,
        replies: ReplyMaker,
        rerank_depth: int,
    ) -> None:
        self._resolver = resolver
        self._registry = registry
        self._embeddings = embeddings
        self._rankers: dict[RankStage, Ranker] = {"edge": edge, "rerank": rerank}
        self._replies = replies
        self._rerank_depth = rerank_depth

    async def answer(self, query: Query, assigned: Assignment) -> RecommendReply:
        """The reply to one query that was assigned to this release, within its deadline."""
        trail = Trail(assigned)
        user = await self._features(query, trail)
        query = query if query.repeats_history else query.without(user.history_keys)
        found = await self._rows(query, user, trail)
        if found is None:
            return self._replies.popular(query, trail)
        scores = Scores(recall=found.recall)
        scores.edge = await self._score("edge", found.inputs, query, trail)
        if scores.edge is not None:
            scores.chosen = best_first(scores.edge)[: self._rerank_depth]
            scores.rerank = await self._score("rerank", found.inputs.only(scores.chosen), query, trail)
        return self._replies.ranked(query, found, scores, places(scores, query.k), trail)

    def fallback(self, query: Query, assigned: Assignment, reason: str) -> RecommendReply:
        """A reply from memory alone."""
        trail = Trail(assigned)
        trail.degrade(reason)
        return self._replies.popular(query, trail)

    async def _features(self, query: Query, trail: Trail) -> ResolvedUser:
        """Keys, bucket, attributes and history; without Redis, what the request itself says."""
        deadline = query.budget.deadline("features")
        with trail.timed("features"):
            if query.candidates is not None:
                await self._registry.learn(query.candidate_keys, deadline)
            user = await self._resolver.resolve(query.user_id, query.context, deadline)
        if user.degraded:
            trail.degrade("history")
        return user

    async def _rows(self, query: Query, user: ResolvedUser, trail: Trail) -> Found | None:
        """Rows and candidates as model inputs; None when there is nothing to rank."""
        deadline = query.budget.deadline("embeddings")
        with trail.timed("embeddings"):
            fetched = await self._embeddings.fetch(query, user, deadline)
            found = self._embeddings.assemble(query, user, fetched)
            if found is not None and query.candidates is None and (found.rows == UNKNOWN).any():
                found = await self._named(query, user, fetched, found, deadline)
        if not fetched.complete:
            trail.degrade("embeddings")
        if found is None:
            return None
        CANDIDATES.observe(found.keys.size)
        DUPLICATES.inc(query.duplicates)
        missing_rows(trail.assignment.lane).inc(int(np.count_nonzero(~found.rows_found)))
        return found

    async def _named(
        self, query: Query, user: ResolvedUser, fetched: Fetched, found: Found, deadline: Deadline
    ) -> Found:
        """Without recalled items that have no name even in the registry: nobody could be shown them."""
        if await self._registry.learn(found.keys, deadline):
            found = self._embeddings.assemble(query, user, fetched) or found
        named = np.flatnonzero(found.rows != UNKNOWN)
        UNNAMED.inc(found.rows.size - named.size)
        return found.only(named)

    async def _score(
        self, stage: Literal["edge", "rerank"], inputs: ModelInputs, query: Query, trail: Trail
    ) -> F32 | None:
        """Logits f32[N] of one ranking tier; None when it gave none in time."""
        if inputs.target.shape[0] == 0:
            return np.empty(0, np.float32)
        with trail.timed(stage):
            try:
                scored = await self._rankers[stage].score(
                    inputs,
                    release=trail.assignment.release,
                    deadline=query.budget.deadline(stage),
                    trace_id=query.trace_id,
                )
            except TrirankError as error:
                trail.failed(stage, error)
                return None
        trail.engines[stage] = scored.engine
        return scored.logits
