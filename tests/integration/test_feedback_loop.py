"""Feedback from the log into histories: on a real broker and a real Redis, through the death of each."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from feature_service.events import FeedbackEvent, FeedbackLoop, encode_event
from feature_service.hashing import ITEM, USER, key_of
from feature_service.schema import FeatureSchema
from feature_service.store import FeatureStore, HistoryWriter
from infra.deadline import Deadline
from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.kafka import LogConsumer, LogProducer, Record, ensure_topics
from tests.brokers import Apache, kafka_home
from tests.support import eventually, ready

SCHEMA = FeatureSchema(n_user_buckets=10)
TOPIC, LETTERS = "s.feedback", "s.deadletter"


class Feedback:
    """A broker, a Redis and a running loop."""

    def __init__(self, directory: Path) -> None:
        self.redis = EmbeddedRedis(directory / "redis")
        self.broker = EmbeddedBroker(directory / "broker", topics={TOPIC: 2, LETTERS: 1})
        for server in (self.redis, self.broker):
            server.start()
            server.wait_ready()
        self.producer = LogProducer(self.broker.bootstrap, delivery_timeout_s=20)
        self.producer.start()
        self.histories = HistoryWriter(self.redis.url, "s", SCHEMA)
        self.loop = self._loop()
        self.loop.start()

    def _loop(self) -> FeedbackLoop:
        def open_reader(positions: Mapping[int, int], identity: str | None) -> LogConsumer:
            return LogConsumer(self.broker.bootstrap, TOPIC, [0, 1], positions=positions, identity=identity)

        return FeedbackLoop(
            HistoryWriter(self.redis.url, "s", SCHEMA),
            open_reader,
            self.producer,
            SCHEMA,
            topic=TOPIC,
            deadletter_topic=LETTERS,
        )

    def restart_loop(self) -> None:
        """End the loop and start another, as after a restart of its process."""
        self.loop.stop()
        self.loop = self._loop()
        self.loop.start()

    def send(self, user: str, item: str, event: str = "click", ts_us: int = 1, partition: int = 0) -> None:
        """One acknowledged event."""
        value = encode_event(FeedbackEvent(user, item, event, ts_us))
        self.producer.send(TOPIC, partition, value).result(20)

    def history(self, user: str) -> list[int]:
        """Item keys in Redis, oldest first."""

        async def go() -> list[int]:
            store = FeatureStore(self.redis.url, "s", SCHEMA)
            try:
                return (await store.read(key_of(USER, user), Deadline.after(30))).history.keys.tolist()
            except RedisUnavailable:
                return []
            finally:
                await store.close()

        return asyncio.run(go())

    def letters(self, n: int) -> list[Record]:
        """The first n dead letters."""
        consumer = LogConsumer(self.broker.bootstrap, LETTERS, [0], positions={})
        consumer.start()
        found: list[Record] = []
        eventually(lambda: len(found.__iadd__(consumer.poll(0.2))) >= n)
        consumer.close()
        return found

    def close(self) -> None:
        """End everything."""
        self.loop.stop()
        self.histories.close()
        self.producer.close()
        self.broker.stop()
        self.redis.stop()


@pytest.fixture
def feedback(tmp_path: Path) -> Iterator[Feedback]:
    made = Feedback(tmp_path)
    yield made
    made.close()


def test_an_event_enters_the_history_of_its_user(feedback: Feedback) -> None:
    feedback.send("u", "a", ts_us=1)
    feedback.send("u", "b", ts_us=2, partition=1)
    feedback.send("v", "c")
    eventually(lambda: len(feedback.history("u")) == 2 and feedback.history("v"))
    assert feedback.history("u") == [key_of(ITEM, "a"), key_of(ITEM, "b")]
    assert feedback.history("v") == [key_of(ITEM, "c")]


def test_impressions_are_counted_and_enter_no_history(feedback: Feedback) -> None:
    feedback.send("u", "a", "impression")
    feedback.send("u", "b", "click")
    eventually(lambda: feedback.histories.counts() == {"impression": 1, "click": 1})
    assert feedback.history("u") == [key_of(ITEM, "b")]
    assert feedback.loop.health()["impressions"] == 1


def test_a_record_nobody_can_read_goes_to_the_dead_letters_with_the_reason_and_holds_up_nothing(
    feedback: Feedback,
) -> None:
    bad = [b"{not json", b'{"user_id": "u"}', encode_event(FeedbackEvent("u", "a", "telepathy", 1))]
    for value in bad:
        feedback.producer.send(TOPIC, 0, value).result(20)
    feedback.send("u", "after")
    eventually(lambda: feedback.history("u") == [key_of(ITEM, "after")])
    letters = feedback.letters(3)
    assert [letter.value for letter in letters] == bad
    about = [msgspec.json.decode(letter.key or b"") for letter in letters]
    assert [a["reason"] for a in about] == ["not_json", "invalid", "unknown_event"]
    assert [(a["topic"], a["partition"], a["offset"]) for a in about] == [(TOPIC, 0, i) for i in range(3)]
    assert feedback.loop.health()["dead_letters"] == 3


def test_events_of_one_record_count_each_and_a_bad_one_among_them_goes_to_the_dead_letters_alone(
    feedback: Feedback,
) -> None:
    shown = encode_event(FeedbackEvent("u", "a", "impression", 1, items=("a", "b")))
    bad = b'{"user_id": "u"}'
    value = b"[" + b",".join((shown, bad, encode_event(FeedbackEvent("u", "c", "click", 2)))) + b"]"
    feedback.producer.send(TOPIC, 0, value).result(20)
    eventually(lambda: feedback.histories.counts() == {"impression": 2, "click": 1})
    assert feedback.history("u") == [key_of(ITEM, "c")]
    assert [letter.value for letter in feedback.letters(1)] == [bad]


def test_a_restarted_loop_goes_on_where_it_was(feedback: Feedback) -> None:
    for i in range(20):
        feedback.send("u", str(i), ts_us=i)
    eventually(lambda: len(feedback.history("u")) == 20)
    feedback.loop.stop()
    feedback.send("u", "while it was away", ts_us=99)
    feedback.restart_loop()
    eventually(lambda: len(feedback.history("u")) == 21)
    assert feedback.histories.counts() == {"click": 21}


def test_redis_killed_loses_no_event_and_counts_none_twice(feedback: Feedback) -> None:
    for i in range(100):
        feedback.send("u", str(i), ts_us=i, partition=i % 2)
        if i == 50:
            pid = feedback.redis.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: feedback.loop.health()["failures"] > 0)
    feedback.redis.restart()
    eventually(lambda: feedback.histories.counts() == {"click": 100})
    assert feedback.history("u") == [key_of(ITEM, str(i)) for i in range(50, 100)]


def test_a_broker_that_lost_its_log_is_counted_once_and_later_events_arrive(feedback: Feedback) -> None:
    feedback.send("u", "before", ts_us=1)
    feedback.send("w", "before", ts_us=1, partition=1)
    eventually(lambda: feedback.history("u") and feedback.history("w"))
    pid = feedback.broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    feedback.broker.restart()
    feedback.send("u", "after", ts_us=2)
    eventually(lambda: len(feedback.history("u")) == 2)
    assert feedback.loop.health()["log_losses"] == 1
    feedback.restart_loop()
    feedback.send("u", "later", ts_us=3)
    eventually(lambda: len(feedback.history("u")) == 3)
    assert feedback.loop.health()["log_losses"] == 0


def test_positions_of_a_log_that_was_lost_while_the_loop_was_away_are_not_used(feedback: Feedback) -> None:
    for i in range(5):
        feedback.send("u", str(i), ts_us=i)
    eventually(lambda: len(feedback.history("u")) == 5)
    feedback.loop.stop()
    feedback.broker.restart()
    for i in range(10):
        feedback.send("v", str(i), ts_us=i)
    feedback.restart_loop()
    eventually(lambda: len(feedback.history("v")) == 10)
    assert feedback.loop.health()["log_losses"] == 1


def test_an_acknowledged_event_is_in_redis_within_a_few_milliseconds(feedback: Feedback) -> None:
    feedback.send("u", "warm")
    eventually(lambda: feedback.history("u"))
    delays_ms = []

    async def go() -> None:
        store = FeatureStore(feedback.redis.url, "s", SCHEMA)
        for i in range(60):
            event = FeedbackEvent(f"u{i}", "a", "click", 1)
            await asyncio.wrap_future(feedback.producer.send(TOPIC, i % 2, encode_event(event)))
            began = time.monotonic()
            while not (await store.read(key_of(USER, f"u{i}"), Deadline.after(30))).history.keys.size:
                assert time.monotonic() - began < 30
            delays_ms.append((time.monotonic() - began) * 1e3)
        await store.close()

    asyncio.run(go())
    p50, p95 = statistics.median(delays_ms), sorted(delays_ms)[56]
    print(f"acknowledged -> in Redis: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    # A few on an idle machine. The loop never waits for a timer of this length.
    assert p50 < 1000


_LOOP_PROCESS = """
import sys, threading
from feature_service.events import FeedbackLoop
from feature_service.schema import FeatureSchema
from feature_service.store import HistoryWriter
from infra.kafka import LogConsumer, LogProducer
redis_url, kafka = sys.argv[1:]
schema = FeatureSchema(n_user_buckets=10)
letters = LogProducer(kafka)
letters.start()
open_reader = lambda at, log: LogConsumer(kafka, "s.feedback", [0, 1], positions=at, identity=log)
FeedbackLoop(HistoryWriter(redis_url, "s", schema), open_reader, letters, schema, topic="s.feedback",
             deadletter_topic="s.deadletter").start()
print("running", flush=True)
threading.Event().wait()
"""


def test_kill_9_of_the_loop_under_load_loses_no_event_and_counts_none_twice(tmp_path: Path) -> None:
    home = kafka_home()
    redis, broker = EmbeddedRedis(tmp_path / "redis"), Apache(home, tmp_path / "kafka")
    with ready(redis):
        broker.start()
        try:
            kill_under_load(redis, broker)
        finally:
            broker.stop()


def kill_under_load(redis: EmbeddedRedis, broker: Apache) -> None:
    ensure_topics(broker.bootstrap, {TOPIC: 2, LETTERS: 1})
    producer = LogProducer(broker.bootstrap)
    producer.start()
    histories = HistoryWriter(redis.url, "s", SCHEMA)
    n = 6000
    try:
        futures = []
        for round_ in range(4):
            command = [sys.executable, "-c", _LOOP_PROCESS, redis.url, broker.bootstrap]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                for i in range(n // 4):
                    event = FeedbackEvent(f"u{i % 7}", str(i), "click", round_ * n + i)
                    futures.append(producer.send(TOPIC, i % 2, encode_event(event)))
                # Kill it in the middle of its work; the last one may finish.
                at_least = 1 if round_ < 3 else n
                before = histories.counts().get("click", 0)
                eventually(lambda: histories.counts().get("click", 0) >= min(before + at_least, n), timeout_s=60)  # noqa: B023
                process.kill()
        producer.flush(30)
        assert all(future.exception() is None for future in futures)
        assert histories.counts() == {"click": n}
        assert sum(histories.positions()[0].values()) == n
    finally:
        producer.close()
        histories.close()
