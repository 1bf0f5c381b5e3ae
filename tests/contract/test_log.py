"""The log seam: the same promises on the embedded broker and on Apache Kafka, and what each does when it is killed."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConfigurationError, LogUnavailable, Overloaded, Permanent
from infra.kafka import LogConsumer, LogLost, LogProducer, LogTruncated, ensure_topics, probe, topic_identity
from infra.kafka_client import kafka, open_client
from tests.brokers import Broker, delete_records, delete_topic, gap_of, make_broker, read, send
from tests.support import eventually, free_port

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["embedded", "apache"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = make_broker(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.stop()


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic of two partitions."""
    name = f"contract.{next(_numbers)}"
    ensure_topics(broker.bootstrap, {name: 2})
    return name


@pytest.fixture
def producer(broker: Broker) -> Iterator[LogProducer]:
    made = LogProducer(broker.bootstrap, delivery_timeout_s=30)
    made.start()
    with closing(made):
        yield made


@pytest.fixture
def consume(broker: Broker, topic: str) -> Iterator[Callable[..., LogConsumer]]:
    """Makes started consumers of the topic and closes them."""
    made: list[LogConsumer] = []

    def make(positions: dict[int, int] | None = None, identity: str | None = None) -> LogConsumer:
        consumer = LogConsumer(broker.bootstrap, topic, [0, 1], positions=positions or {}, identity=identity)
        made.append(consumer)
        consumer.start()
        return consumer

    yield make
    for consumer in made:
        consumer.close()


def test_a_record_comes_back_with_its_key_partition_and_acknowledged_offset(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    offset = producer.send(topic, 1, b"value", b"key").result(20)
    (record,) = read(consume(), 1)
    assert (record.partition, record.offset, record.key, record.value) == (1, offset, b"key", b"value")
    assert abs(record.timestamp_ms / 1000 - time.time()) < 60


def test_a_client_that_is_closed_while_it_has_something_to_send_leaves_no_socket(broker: Broker, topic: str) -> None:
    client = open_client(kafka.KafkaConsumer, broker.bootstrap, 10.0, enable_auto_commit=False)
    client.assign([kafka.TopicPartition(topic, 0)])
    client.seek(kafka.TopicPartition(topic, 0), 0)
    conns = client._manager._conns

    def connected() -> list[Any]:
        client.poll(timeout_ms=100)
        return [conn.transport for conn in list(conns.values()) if conn.connected]

    transports = eventually(connected)
    sockets = [transport._sock for transport in transports]
    for transport in transports:
        # As it is while the socket takes no more.
        transport._write_buffer.append(b"more")
        transport._writing = True
    client.close(autocommit=False)
    assert [sock.fileno() for sock in sockets] == [-1] * len(sockets)


def test_a_reader_at_the_end_misses_no_record_of_several_producers(
    broker: Broker, consume: Callable[..., LogConsumer], topic: str
) -> None:
    reader = consume()

    def write() -> None:
        with closing(LogProducer(broker.bootstrap, delivery_timeout_s=30)) as producer:
            producer.start()
            for i in range(200):
                producer.send(topic, 0, b"%d" % i).result(20)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    records = read(reader, 800, timeout_s=120)
    for writer in writers:
        writer.join()
    assert [r.offset for r in records] == list(range(800))


def test_records_of_one_partition_come_back_in_the_order_they_were_sent(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    values = [b"%d" % i for i in range(2000)]
    futures = [producer.send(topic, i % 2, v) for i, v in enumerate(values)]
    producer.flush(20)
    assert all(f.done() for f in futures)
    records = read(consume(), 2000)
    assert [r.value for r in records if r.partition == 0] == values[0::2]
    assert [r.value for r in records if r.partition == 1] == values[1::2]
    assert [r.offset for r in records if r.partition == 1] == list(range(1000))


def test_a_record_of_ten_mebibytes_passes_and_a_larger_one_than_allowed_is_refused(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    large = os.urandom(10 * 1024 * 1024)
    send(producer, topic, [large])
    assert read(consume(), 1)[0].value == large
    with pytest.raises(Permanent, match="too large"):
        producer.send(topic, 0, bytes(17 * 1024 * 1024)).result(20)


def test_reading_starts_at_the_position_even_in_the_middle_of_a_batch(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    send(producer, topic, [b"%d" % i for i in range(100)])
    consumer = consume({0: 37})
    assert [r.offset for r in read(consumer, 63)] == list(range(37, 100))
    assert consumer.positions() == {0: 100, 1: 0}


def test_highwater_is_the_offset_after_the_newest_record(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    send(producer, topic, [b"x"] * 100)
    send(producer, topic, [b"x"] * 100)
    consumer = consume()
    records = consumer.poll(5.0, max_records=10)
    assert len(records) == 10
    assert consumer.highwater()[0] == 200
    read(consumer, 190)
    assert consumer.earliest() == {0: 0, 1: 0}


def test_a_waiting_consumer_gets_a_new_record_without_waiting_for_its_timeout(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    consumer = consume()
    send(producer, topic, [b"warm"])
    read(consumer, 1)
    delays = []
    for _ in range(20):
        started = time.monotonic()
        producer.send(topic, 0, b"x")
        assert consumer.poll(5.0)
        delays.append(time.monotonic() - started)
    assert sorted(delays)[10] < 0.1


def test_a_position_beyond_the_end_is_a_lost_log_until_the_reader_seeks(
    producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    send(producer, topic, [b"a", b"b"])
    consumer = consume({0: 50})
    gap = gap_of(consumer)
    assert isinstance(gap, LogLost)
    assert (gap.partition, gap.position, gap.resume_at) == (0, 50, 0)
    with pytest.raises(LogLost):
        consumer.poll(0.1)
    consumer.seek(0, gap.resume_at)
    assert [r.value for r in read(consumer, 2)] == [b"a", b"b"]


def test_positions_of_another_log_are_refused_at_the_first_poll(
    broker: Broker, producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    send(producer, topic, [b"a", b"b"])
    assert read(consume({0: 1}, topic_identity(broker.bootstrap, topic)), 1)[0].value == b"b"
    consumer = consume({0: 1}, "some-other-cluster/topic")
    with pytest.raises(LogLost):
        consumer.poll(1.0)
    assert consumer.identity == topic_identity(broker.bootstrap, topic)


def test_a_topic_made_anew_under_a_reader_is_a_lost_log(
    broker: Broker, producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    send(producer, topic, [b"a", b"b", b"c"])
    consumer = consume()
    read(consumer, 3)
    before = consumer.identity
    delete_topic(broker.bootstrap, topic)
    ensure_topics(broker.bootstrap, {topic: 2})
    gap = gap_of(consumer)
    assert isinstance(gap, LogLost)
    assert (gap.partition, gap.position) == (0, 3)
    consumer.seek(0, gap.resume_at)
    eventually(lambda: topic_identity(broker.bootstrap, topic) != before)
    with closing(LogProducer(broker.bootstrap)) as fresh:
        fresh.start()
        send(fresh, topic, [b"new"])
    assert read(consumer, 1)[0].value == b"new"


def test_making_topics_twice_is_fine_and_another_number_of_partitions_is_an_error(broker: Broker, topic: str) -> None:
    ensure_topics(broker.bootstrap, {topic: 2})
    with pytest.raises(ConfigurationError, match=f"{topic}.*has 2 partitions, 3 are asked for"):
        ensure_topics(broker.bootstrap, {topic: 3})


def test_a_missing_topic_is_an_error_and_asking_for_it_does_not_make_it(broker: Broker) -> None:
    missing = f"missing.{next(_numbers)}"
    consumer = LogConsumer(broker.bootstrap, missing, [0], positions={})
    with pytest.raises(LogUnavailable, match=missing):
        consumer.start()
    with closing(LogProducer(broker.bootstrap, delivery_timeout_s=1.0)) as producer:
        producer.start()
        with pytest.raises(LogUnavailable):
            producer.send(missing, 0, b"x").result(10)
    with pytest.raises(LogUnavailable, match=missing):
        topic_identity(broker.bootstrap, missing)


def test_a_partition_that_does_not_exist_takes_no_records(producer: LogProducer, topic: str) -> None:
    with pytest.raises(Permanent):
        producer.send(topic, 7, b"x").result(20)


def test_a_broker_says_whether_it_keeps_what_it_acknowledged(
    broker: Broker, consume: Callable[..., LogConsumer]
) -> None:
    assert probe(broker.bootstrap).durable is broker.durable
    assert consume().durable is broker.durable


def test_after_kill_9_producer_and_consumer_go_on_and_acknowledged_records_are_there_or_reported_lost(
    broker: Broker, producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    before = [b"%d" % i for i in range(500)]
    send(producer, topic, before)
    consumer = consume()
    read(consumer, 100 if broker.durable else 500)
    broker.kill()
    fetched_before = consumer.poll(0.2)
    broker.start()
    ensure_topics(broker.bootstrap, {topic: 2})
    if broker.durable:
        rest = fetched_before + read(consumer, 400 - len(fetched_before))
        assert [r.value for r in rest] == before[100:]
    else:
        gap = gap_of(consumer)
        assert isinstance(gap, LogLost)
        consumer.seek(gap.partition, gap.resume_at)
    assert producer.send(topic, 0, b"after").result(30) == (500 if broker.durable else 0)
    assert read(consumer, 1)[0].value == b"after"


def test_a_lost_log_that_has_grown_past_the_position_is_still_noticed(
    broker: Broker, producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    if broker.durable:
        pytest.skip("a durable broker does not lose its log")
    send(producer, topic, [b"old"] * 3)
    consumer = consume()
    read(consumer, 3)
    broker.kill()
    broker.start()
    ensure_topics(broker.bootstrap, {topic: 2})
    with closing(LogProducer(broker.bootstrap)) as fresh:
        fresh.start()
        send(fresh, topic, [b"%d" % i for i in range(10)])
    gap = gap_of(consumer)
    assert isinstance(gap, LogLost)
    consumer.seek(gap.partition, gap.resume_at)
    assert [r.value for r in read(consumer, 10)] == [b"%d" % i for i in range(10)]


def test_a_log_that_no_longer_reaches_back_is_reported_with_what_is_left(
    broker: Broker, producer: LogProducer, consume: Callable[..., LogConsumer], topic: str
) -> None:
    if not broker.durable:
        pytest.skip("the embedded broker never truncates its log")
    send(producer, topic, [b"%d" % i for i in range(10)])
    delete_records(broker.bootstrap, topic, 0, before=6)
    consumer = consume({0: 2})
    gap = gap_of(consumer)
    assert isinstance(gap, LogTruncated)
    assert (gap.position, gap.resume_at) == (2, 6)
    consumer.seek(0, gap.resume_at)
    assert [r.value for r in read(consumer, 4)] == [b"6", b"7", b"8", b"9"]


def test_a_closed_client_leaves_no_thread_and_no_socket(
    broker: Broker, topic: str, consume: Callable[..., LogConsumer]
) -> None:
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with closing(LogProducer(broker.bootstrap)) as producer:
        producer.start()
        producer.send(topic, 0, b"x").result(20)
    consumer = consume()
    read(consumer, 1)
    consumer.close()
    eventually(lambda: threading.active_count() <= threads)
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files)


def test_no_broker_at_all_is_said_within_seconds_and_leaves_nothing_behind() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    threads, started = threading.active_count(), time.monotonic()
    with pytest.raises(LogUnavailable, match=nowhere):
        probe(nowhere)
    with pytest.raises(LogUnavailable, match=nowhere):
        LogConsumer(nowhere, "x", [0], positions={}).start()
    assert time.monotonic() - started < 60.0
    eventually(lambda: threading.active_count() <= threads)


def test_without_a_broker_records_are_kept_up_to_a_bound_and_fail_at_their_time() -> None:
    producer = LogProducer(f"127.0.0.1:{free_port()}", delivery_timeout_s=3.0, max_pending=2)
    producer.start()
    with closing(producer):
        first, second = producer.send("x", 0, b"1"), producer.send("x", 0, b"2")
        with pytest.raises(Overloaded):
            producer.send("x", 0, b"3")
        for future in (first, second):
            with pytest.raises(LogUnavailable):
                future.result(30)
    with pytest.raises(LogUnavailable, match="closed"):
        producer.send("x", 0, b"4")
