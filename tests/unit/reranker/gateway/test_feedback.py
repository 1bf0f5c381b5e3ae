from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future

import pytest

from feature_service.events import decode_event, events_in
from infra.errors import LogUnavailable, Overloaded
from infra.log import Record
from reranker.gateway.feedback import FeedbackLog
from reranker.gateway.impressions import COLLECT_BYTES, Impressions
from reranker.gateway.problems import Problem
from reranker.gateway.query import query_of
from reranker.gateway.schemas import (
    CoverageBlock,
    Degraded,
    FeedbackItem,
    RankedItem,
    RecommendReply,
    RecommendRequest,
    ReleaseBlock,
    Versions,
)

NOW_S = 1_000_000.0


class Clock:
    """Stands still."""

    def monotonic_s(self) -> float:
        return 0.0

    def now_us(self) -> int:
        return int(NOW_S * 1e6)


class Producer:
    """Keeps what it is sent; acknowledges, fails or stays silent."""

    def __init__(self, *, fails: Exception | None = None, silent: bool = False, room: int = 10**9) -> None:
        self.sent: list[tuple[str, int, bytes, bytes | None]] = []
        self.futures: list[Future[int]] = []
        self._fails, self._silent, self._room = fails, silent, room

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        if len(self.sent) >= self._room:
            raise Overloaded("full")
        self.sent.append((topic, partition, value, key))
        future: Future[int] = Future()
        self.futures.append(future)
        if self._fails is not None:
            future.set_exception(self._fails)
        elif not self._silent:
            future.set_result(len(self.sent))
        return future


def item(event: str = "click", user: str | int = "u", ts: float | None = None) -> FeedbackItem:
    return FeedbackItem(user_id=user, item_id=5, event=event, ts=ts)


def accept(producer: Producer, *items: FeedbackItem) -> None:
    log = FeedbackLog(producer, "t", 8, ("click", "play"), Clock(), acknowledge_s=0.05)
    asyncio.run(log.accept(items))


def test_events_of_one_user_go_to_one_partition_in_order() -> None:
    producer = Producer()

    accept(producer, *[item(ts=float(n), user=n % 5) for n in range(50)])

    partitions: dict[str, set[int]] = {}
    for _, partition, value, _ in producer.sent:
        partitions.setdefault(decode_event(value).user_id, set()).add(partition)
    assert all(len(found) == 1 for found in partitions.values())
    assert len(set.union(*partitions.values())) > 1
    assert [decode_event(value).ts_us for _, _, value, _ in producer.sent] == [n * 1_000_000 for n in range(50)]


def test_an_event_without_a_time_happens_now() -> None:
    producer = Producer()

    accept(producer, item())

    event = decode_event(producer.sent[0][2])
    assert (event.ts_us, event.item_id) == (int(NOW_S * 1e6), "5")


def test_times_up_to_five_minutes_ahead_are_accepted() -> None:
    accept(Producer(), item(ts=NOW_S + 299))

    with pytest.raises(Problem) as raised:
        accept(Producer(), item(), item(ts=NOW_S + 301))
    assert (raised.value.status, raised.value.field) == (422, "events[1].ts")


def test_one_unknown_event_type_refuses_all_before_anything_is_sent() -> None:
    producer = Producer()

    with pytest.raises(Problem) as raised:
        accept(producer, item("impression"), item("sneeze"))
    assert raised.value.field == "events[1].event"
    assert "impression, click, play" in raised.value.detail
    assert producer.sent == []


@pytest.mark.parametrize(
    "producer", [Producer(fails=LogUnavailable("no broker")), Producer(silent=True), Producer(room=1)]
)
def test_what_is_not_acknowledged_is_refused_with_a_time_to_come_back(producer: Producer) -> None:
    with pytest.raises(Problem) as raised:
        accept(producer, item(), item())
    assert (raised.value.status, raised.value.slug) == (503, "log-unavailable")
    assert raised.value.retry_after_s == 1
    assert all(future.done() for future in producer.futures)


def reply(*ids: str) -> RecommendReply:
    return RecommendReply(
        "rec",
        "q",
        [RankedItem(item_id, 0.5, rank, "edge") for rank, item_id in enumerate(ids, start=1)],
        ReleaseBlock("r1", "stable", 0, ""),
        Versions("", "", 0, "", 0),
        Degraded(False, []),
        CoverageBlock(0, 0, 0, 0, [], "known"),
        {},
    )


def offer(producer: Producer, asked: RecommendRequest, *answers: RecommendReply, flush: bool = True) -> None:
    query = query_of(asked, nonce=bytes(8), trace_id=None, start_s=0.0, default_deadline_ms=100.0)

    async def go() -> None:
        impressions = Impressions(producer, "t", 8, Clock())
        for answer in answers:
            impressions.offer(query, answer)
        if flush:
            impressions.flush()

    asyncio.run(go())


def test_an_impression_can_be_read_by_any_reader_of_events() -> None:
    producer = Producer()

    offer(producer, RecommendRequest(user_id=196), reply("a", "b"))

    [(_, _, array, _)] = producer.sent
    [record] = events_in(Record(0, 0, 0, None, array))
    value = record.value
    event = decode_event(value)
    assert (event.user_id, event.item_id, event.event, event.recommendation_id) == ("196", "a", "impression", "rec")
    assert json.loads(value)["items"] == ["a", "b"]
    assert json.loads(value)["release"] == "r1"


def test_nothing_shown_is_no_impression() -> None:
    producer = Producer()

    offer(producer, RecommendRequest(), reply())

    assert producer.sent == []


def test_many_replies_make_one_record() -> None:
    producer = Producer()

    offer(producer, RecommendRequest(user_id=1), *[reply("a")] * 100)

    [(_, _, array, _)] = producer.sent
    assert len(events_in(Record(0, 0, 0, None, array))) == 100


def test_a_record_never_grows_too_large_to_send() -> None:
    producer = Producer()

    offer(producer, RecommendRequest(user_id=1), *[reply(*"x" * 256)] * 1000, flush=False)

    assert len(producer.sent) > 1
    assert max(len(value) for _, _, value, _ in producer.sent) < 2 * COLLECT_BYTES


def test_impressions_leave_by_themselves_after_a_moment() -> None:
    producer = Producer()

    async def go() -> None:
        query = query_of(RecommendRequest(), nonce=bytes(8), trace_id=None, start_s=0.0, default_deadline_ms=100.0)
        Impressions(producer, "t", 8, Clock()).offer(query, reply("a"))
        async with asyncio.timeout(10):
            while not producer.sent:
                await asyncio.sleep(0.01)

    asyncio.run(go())


@pytest.mark.parametrize("producer", [Producer(room=0), Producer(fails=LogUnavailable("no broker"))])
def test_an_impression_that_cannot_be_sent_is_dropped(producer: Producer) -> None:
    offer(producer, RecommendRequest(session_id="s"), reply("a"))
