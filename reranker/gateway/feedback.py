"""Feedback events into the log: accepted only when the log has acknowledged every one of them.

Refuses event types the release's schema does not know and times in the future, naming the field. Invariant: a caller
that was told 202 has all his events in the log. One that was told 503 may send them again; with a `ts` of his own a
repeated event is the same event and counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

from feature_service.events import IMPRESSION, FeedbackEvent, encode_event
from feature_service.hashing import USER, keys_of
from infra.clock import Clock
from infra.errors import TrirankError
from param_server.routing import partition_of
from reranker.gateway.metrics import FEEDBACK
from reranker.gateway.problems import Problem, invalid
from reranker.gateway.schemas import FeedbackItem, text_id

ACKNOWLEDGE_S = 2.0
MAX_FUTURE_S = 300.0
RETRY_AFTER_S = 1


class Producer(Protocol):
    """What this module needs of `infra.kafka.LogProducer`."""

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        """The future offset; raises Overloaded or LogUnavailable at once."""
        ...


class FeedbackLog:
    """Writes events to the feedback topic, all of one user to one partition."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        n_partitions: int,
        history_events: Collection[str],
        clock: Clock,
        *,
        acknowledge_s: float = ACKNOWLEDGE_S,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._n_partitions = n_partitions
        self._known = (IMPRESSION, *history_events)
        self._clock = clock
        self._acknowledge_s = acknowledge_s

    async def accept(self, items: Sequence[FeedbackItem]) -> None:
        """Return when all events are acknowledged. Raises Problem: 422 naming a field, 503 when they are not."""
        events = self._events(items)
        partitions = partition_of(keys_of(USER, [event.user_id for event in events]), self._n_partitions).tolist()
        sent: list[asyncio.Future[int]] = []
        try:
            for event, partition in zip(events, partitions, strict=True):
                record = self._producer.send(self._topic, partition, encode_event(event), event.user_id.encode())
                sent.append(asyncio.wrap_future(record))
            async with asyncio.timeout(self._acknowledge_s):
                await asyncio.gather(*sent)
        except (TrirankError, TimeoutError) as error:
            FEEDBACK.labels("unacknowledged").inc(len(events))
            await _drop(sent)
            detail = str(error) or f"not acknowledged within {self._acknowledge_s:g} s"
            raise Problem("log-unavailable", detail, retry_after_s=RETRY_AFTER_S) from error
        FEEDBACK.labels("accepted").inc(len(events))

    def _events(self, items: Sequence[FeedbackItem]) -> list[FeedbackEvent]:
        now_us = self._clock.now_us()
        return [self._event(item, f"events[{i}]", now_us) for i, item in enumerate(items)]

    def _event(self, item: FeedbackItem, path: str, now_us: int) -> FeedbackEvent:
        if item.event not in self._known:
            raise invalid(f"{path}.event", f"Expected one of {', '.join(self._known)}")
        if item.ts is not None and item.ts * 1e6 > now_us + MAX_FUTURE_S * 1e6:
            raise invalid(f"{path}.ts", "Expected seconds since 1970, at most 5 minutes from now")
        return FeedbackEvent(
            user_id=text_id(item.user_id, f"{path}.user_id"),
            item_id=text_id(item.item_id, f"{path}.item_id"),
            event=item.event,
            ts_us=now_us if item.ts is None else int(item.ts * 1e6),
            recommendation_id=item.recommendation_id,
        )


async def _drop(sent: Sequence[asyncio.Future[int]]) -> None:
    """Take back what has not been handed to the log yet, and look at every outcome."""
    for future in sent:
        future.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
