"""What was shown, to the feedback topic, after the reply has been sent: many replies in one record.

A record is a JSON array of impressions. A request costs one append; a record leaves every `COLLECT_S` while there is
traffic, sooner when much was shown. Refuses when the producer's queue is full; what is dropped is counted.
Impressions are counts, not history: losing some takes nothing away from a user.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial

import msgspec

from feature_service.events import IMPRESSION
from infra.clock import Clock
from infra.errors import TrirankError
from reranker.gateway.feedback import Producer
from reranker.gateway.metrics import IMPRESSIONS
from reranker.gateway.query import Query
from reranker.gateway.schemas import RecommendReply

# A record costs the gateway, the broker and the reader about as much as answering a request does.
COLLECT_S = 0.2
# Far below what one record may hold.
COLLECT_BYTES = 256 * 1024


class Impression(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reply as a feedback event of its first item; `items` has all of them, in the order shown.

    Readers that know only the fields of `FeedbackEvent` can read it too. `user_id` is the unit of the split: for
    somebody anonymous his session or the request.
    """

    user_id: str
    item_id: str
    event: str
    ts_us: int
    recommendation_id: str
    items: list[str]
    release: str
    arm: str


_encode = msgspec.json.Encoder().encode
_ACKNOWLEDGED = IMPRESSIONS.labels("acknowledged")
_DROPPED = IMPRESSIONS.labels("dropped")


class Impressions:
    """Collects impressions and sends them without ever waiting for the log. For one event loop."""

    def __init__(self, producer: Producer, topic: str, n_partitions: int, clock: Clock) -> None:
        self._producer = producer
        self._topic = topic
        self._n_partitions = n_partitions
        self._clock = clock
        self._collected: list[bytes] = []
        self._bytes = 0
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, query: Query, reply: RecommendReply) -> None:
        """Note that a reply was sent. Never blocks, raises nothing of the log's."""
        if not reply.items:
            return
        shown = [item.item_id for item in reply.items]
        record = _encode(
            Impression(
                user_id=query.unit,
                item_id=shown[0],
                event=IMPRESSION,
                ts_us=self._clock.now_us(),
                recommendation_id=reply.recommendation_id,
                items=shown,
                release=reply.release.id,
                arm=reply.release.arm,
            )
        )
        self._collected.append(record)
        self._bytes += len(record)
        if self._bytes >= COLLECT_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COLLECT_S, self.flush)

    def flush(self) -> None:
        """Send what was collected; to be called once more at the end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        collected, self._collected, self._bytes = self._collected, [], 0
        if not collected:
            return
        # Nobody needs impressions in order, so the partitions take turns.
        self._sent += 1
        partition = self._sent % self._n_partitions
        try:
            sent = self._producer.send(self._topic, partition, b"[" + b",".join(collected) + b"]")
        except TrirankError:
            _DROPPED.inc(len(collected))
        else:
            sent.add_done_callback(partial(_count, len(collected)))


def _count(n: int, sent: Future[int]) -> None:
    (_DROPPED if sent.cancelled() or sent.exception() else _ACKNOWLEDGED).inc(n)
