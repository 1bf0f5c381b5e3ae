"""Shadow traffic: a share of what stable has answered is scored by the candidate release too, for nobody.

It begins when the answer has left, and takes only what the answers leave over: few requests wait, fewer run, each has
a deadline, and while the gateway has other requests in flight none begins. What cannot be done soon is dropped and
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

# Requests that wait, those that run at a time, and how long one waits at most before it is stale.
MAX_WAITING = 32
MAX_RUNNING = 1
STALE_S = 2.0
DEADLINE_S = 1.0
# How often a gateway that is busy looks whether it still is.
_LOOK_EVERY_S = 0.002


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
        self._running: set[asyncio.Task[None]] = set()

    def sent(self, query: Query, reply: RecommendReply, assigned: Assignment, took_s: float) -> None:
        """An answer that counts for a gray release has left: look at what it showed, and take a copy if its turn."""
        self._arms.tally.showed(assigned, sight_of(reply))
        split = self._arms.split
        if not split.shadow_ppm or assigned.arm != "stable" or split.candidate is None:
            return
        if xxhash.xxh3_64_intdigest(query.nonce) * PPM >> 64 >= split.shadow_ppm:
            return
        if len(self._waiting) >= MAX_WAITING:
            SHADOW.labels("full").inc()
            return
        self._waiting.append(Copy(query, reply, took_s, assigned.bucket_ppm, split.version, time.monotonic()))
        if len(self._running) < MAX_RUNNING:
            task = asyncio.get_running_loop().create_task(self._drain())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        await ended(*self._running)

    async def _drain(self) -> None:
        while self._waiting:
            while self._admission.in_flight and not self._is_stale(self._waiting[0]):
                await asyncio.sleep(_LOOK_EVERY_S)
            copy = self._waiting.popleft()
            if copy.version != self._arms.split.version:
                SHADOW.labels("over").inc()
            elif self._is_stale(copy):
                SHADOW.labels("busy").inc()
            else:
                await self._score(copy)

    def _is_stale(self, copy: Copy) -> bool:
        return time.monotonic() - copy.offered_s > STALE_S

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
