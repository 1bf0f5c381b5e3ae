"""What was shown, to the feedback topic, after the reply has been sent: one record per reply.

Costs a request nothing: `offer` is one append to the producer's bounded queue. Refuses when that is full; what is
dropped is counted. Impressions are counts, not history: losing some takes nothing away from a user.
"""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import numpy as np

from feature_service.events import IMPRESSION
from feature_service.hashing import USER, key_of
from infra.clock import Clock
from infra.errors import TrirankError
from param_server.routing import partition_of
from reranker.gateway.feedback import Producer
from reranker.gateway.metrics import IMPRESSIONS
from reranker.gateway.query import Query
from reranker.gateway.schemas import RecommendReply


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
    """Sends impressions without ever waiting for the log."""

    def __init__(self, producer: Producer, topic: str, n_partitions: int, clock: Clock) -> None:
        self._producer = producer
        self._topic = topic
        self._n_partitions = n_partitions
        self._clock = clock

    def offer(self, query: Query, reply: RecommendReply) -> None:
        """Note that a reply was sent. Never blocks, raises nothing of the log's."""
        if not reply.items:
            return
        shown = [item.item_id for item in reply.items]
        unit = query.unit
        record = Impression(
            user_id=unit,
            item_id=shown[0],
            event=IMPRESSION,
            ts_us=self._clock.now_us(),
            recommendation_id=reply.recommendation_id,
            items=shown,
            release=reply.release.id,
            arm=reply.release.arm,
        )
        partition = int(partition_of(np.array([key_of(USER, unit)], np.int64), self._n_partitions)[0])
        try:
            self._producer.send(self._topic, partition, _encode(record)).add_done_callback(_count)
        except TrirankError:
            _DROPPED.inc()


def _count(sent: Future[int]) -> None:
    (_DROPPED if sent.cancelled() or sent.exception() else _ACKNOWLEDGED).inc()
