"""Shadow traffic: a share of what stable has answered is scored by the candidate release too, for nobody.

It begins when the answer has left, and takes only what the answers leave over: few copies wait, one runs, each has a
deadline, and while the gateway has requests in flight none begins. What cannot be done soon is dropped and
counted, before any user could notice. What comes of it are counts (`tally`): likeness, scores, faults; the answers are
thrown away. Invariant: nothing made here is ever sent to anybody, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from infra.tasks import ended
from reranker.gateway.admission import Admission
from reranker.gateway.counting import outcome_of, sight_of
from reranker.gateway.degrade import Budget
from reranker.gateway.metrics import SHADOW
from reranker.gateway.pipeline import Pipeline
from reranker.gateway.query import Query
from reranker.gateway.schemas import RecommendReply
from reranker.gray.arms import Arms
from reranker.gray.compare import likeness
from reranker.gray.split import PPM, Assignment

logger = logging.getLogger(__name__)

# Copies that wait (one runs at a time), and how long one waits at most before it is stale.
MAX_WAITING = 32
STALE_S = 2.0
DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Copy:
    """One request with the answer that was shown."""

    query: Query
    reply: RecommendReply
    took_s: float
    bucket_ppm: int
    version: int
    offered_s: float


class Shadow:
    """The shadow traffic of one gateway; for one event loop. `pipeline` gives that of a release by name."""

    def __init__(self, arms: Arms, admission: Admission, pipeline: Callable[[str], Pipeline]) -> None:
        self._arms = arms
        self._admission = admission
        self._pipeline = pipeline
        self._waiting: deque[Copy] = deque()
        self._running: asyncio.Task[None] | None = None

    def sent(self, query: Query, reply: RecommendReply, assigned: Assignment, took_s: float) -> None:
        """An answer that counts for a gray release has left: look at what it showed, take a copy if it is its turn, and
        go on with those that wait if there is nothing else to do."""
        if assigned.compared:
            self._arms.tally.showed(assigned, sight_of(reply))
        self._take(query, reply, assigned, took_s)
        if self._waiting:
            self._go_on()

    def _take(self, query: Query, reply: RecommendReply, assigned: Assignment, took_s: float) -> None:
        split = self._arms.split
        if not split.shadow_ppm or assigned.arm != "stable" or split.candidate is None:
            return
        if xxhash.xxh3_64_intdigest(query.nonce) * PPM >> 64 >= split.shadow_ppm:
            return
        self._drop_stale()
        if len(self._waiting) >= MAX_WAITING:
            SHADOW.labels("full").inc()
            return
        self._waiting.append(Copy(query, reply, took_s, assigned.bucket_ppm, split.version, time.monotonic()))

    async def close(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        if self._running is not None:
            await ended(self._running)

    def _go_on(self) -> None:
        """Score the next copy, unless one is being scored or a request is being answered: then whoever ends last asks
        again."""
        if self._running is not None or self._admission.in_flight:
            return
        self._drop_stale()
        while self._waiting:
            copy = self._waiting.popleft()
            if copy.version == self._arms.split.version:
                self._running = asyncio.get_running_loop().create_task(self._score(copy))
                self._running.add_done_callback(self._scored)
                return
            SHADOW.labels("over").inc()

    def _scored(self, _: asyncio.Task[None]) -> None:
        self._running = None
        self._go_on()

    def _drop_stale(self) -> None:
        too_old_s = time.monotonic() - STALE_S
        while self._waiting and self._waiting[0].offered_s < too_old_s:
            self._waiting.popleft()
            SHADOW.labels("busy").inc()

    async def _score(self, copy: Copy) -> None:
        split = self._arms.split
        if split.candidate is None:
            return
        began_s = time.monotonic()
        query = replace(copy.query, budget=Budget(began_s, DEADLINE_S))
        assigned = Assignment(split.candidate, "candidate", copy.bucket_ppm, "shadow", shadow=True)
        try:
            reply = await self._pipeline(split.candidate).answer(query, assigned)
        except Exception:  # the outermost loop of a request
            logger.exception("a request failed in the shadow", extra={"trace_id": query.trace_id})
            SHADOW.labels("failed").inc()
            return
        SHADOW.labels("scored").inc()
        whole = not copy.reply.degraded.value and not reply.degraded.value
        alike = likeness([i.item_id for i in copy.reply.items], [i.item_id for i in reply.items]) if whole else None
        self._arms.tally.shadowed(
            split.epoch,
            (outcome_of(copy.query, copy.reply, copy.took_s), sight_of(copy.reply)),
            (outcome_of(query, reply, time.monotonic() - began_s), sight_of(reply)),
            alike,
        )
