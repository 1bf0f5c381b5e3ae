"""The seam to Kafka: topics, one consumer, one producer, with the errors of kafka-python translated into ours.

Works alike on Apache Kafka and on the embedded broker. Refuses to join groups and to commit: positions belong to
whoever applies the records. Invariant: no exception of kafka-python leaves this file.

kafka-python is pinned, because some things need its internals: here, a new connection must be noticed; for the others
see `kafka_client.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.errors import ConfigurationError, LogUnavailable, Permanent, TrirankError
from infra.kafka_client import kafka, kafka_errors, open_client
from infra.log import (
    TIMEOUT_S,
    BrokerInfo,
    LogGap,
    LogLost,
    LogTruncated,
    OutOfRange,
    Record,
    is_durable,
)
from infra.log_reader import GuardedReader
from infra.outbox import Outbox, Outgoing

__all__ = ["BrokerInfo", "LogConsumer", "LogGap", "LogLost", "LogProducer", "LogTruncated", "Record"]
__all__ += ["MAX_RECORD_BYTES", "ensure_topics", "probe", "topic_identity"]

MAX_RECORD_BYTES = 16 * 1024 * 1024
# The record's own headers, which count against the limits as well.
_ENVELOPE_BYTES = 64 * 1024


def probe(bootstrap: str, timeout_s: float = TIMEOUT_S) -> BrokerInfo:
    """Ask the broker who it is. Raises LogUnavailable within about `timeout_s` seconds."""
    with _admin(bootstrap, timeout_s) as admin:
        cluster = admin._manager.cluster
        version = ".".join(map(str, admin._manager.broker_version or ()))
        cluster_id = cluster.cluster_id or ""
        return BrokerInfo(cluster_id, version, len(cluster.brokers()), is_durable(cluster_id))


def topic_identity(bootstrap: str, topic: str, timeout_s: float = TIMEOUT_S) -> str:
    """A name that changes when the topic is made anew or the broker has lost it. Raises LogUnavailable."""
    with _admin(bootstrap, timeout_s) as admin:
        found = admin.describe_topics([topic])[0]
        if found["error_code"]:
            raise LogUnavailable(f"log: {bootstrap} has no topic {topic}")
        return f"{admin._manager.cluster.cluster_id}/{found['topic_id']}"


def ensure_topics(
    bootstrap: str, topics: Mapping[str, int], configs: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> None:
    """Make the topics (name -> partitions) that are missing and wait until they can be used.

    To be called before any client sends: what reaches the embedded broker before the topic exists is lost.
    Raises ConfigurationError when a topic exists with another number of partitions, LogUnavailable.
    """
    with _admin(bootstrap, timeout_s) as admin:
        present = {t["name"] for t in admin.describe_topics(list(topics)) if not t["error_code"]}
        missing = {
            name: {"num_partitions": n, "replication_factor": -1, "configs": dict(configs or {})}
            for name, n in topics.items()
            if name not in present
        }
        if missing:
            # Another process may make them at the same moment, so "exists already" is no error.
            admin.create_topics(missing, raise_errors=False)
            admin.wait_for_topics(list(missing), timeout_ms=timeout_s * 1000)
        for found in admin.describe_topics(list(topics)):
            name, n = found["name"], len(found["partitions"])
            if n != topics[name]:
                raise ConfigurationError(
                    f"partitions: topic {name} at {bootstrap} has {n} partitions, {topics[name]} are asked for; "
                    f"ask for {n}, or choose another stack name"
                )


class LogConsumer(GuardedReader):
    """Reads given partitions of one Kafka topic; the guards and the interface are GuardedReader's."""

    def _connect(self, timeout_s: float) -> _ConsumerLink:
        with _translated(self._bootstrap):
            consumer = open_client(
                kafka.KafkaConsumer,
                self._bootstrap,
                timeout_s,
                enable_auto_commit=False,
                auto_offset_reset="none",
                max_partition_fetch_bytes=MAX_RECORD_BYTES + _ENVELOPE_BYTES,
            )
            try:
                consumer.assign([kafka.TopicPartition(self._topic, p) for p in self._next])
                for partition, offset in self._next.items():
                    consumer.seek(kafka.TopicPartition(self._topic, partition), offset)
                if not _partitions(consumer, self._topic, timeout_s).issuperset(self._next):
                    raise LogUnavailable(f"log: {self._bootstrap} lacks topic {self._topic} or some of its partitions")
            except BaseException:
                consumer.close(autocommit=False)
                raise
        return _ConsumerLink(consumer, self._bootstrap, self._topic, list(self._next))


class LogProducer(Outbox):
    """Writes records to Kafka, acknowledged by all replicas; the interface is Outbox's.

    On a durable broker each record is written once and in order. One that keeps its log in memory cannot tell a
    repeated record after it was restarted, so there a record may appear twice after a lost connection.
    """

    def _connect(self, timeout_s: float) -> _ProducerLink:
        durable = probe(self._bootstrap, timeout_s).durable
        delivery_ms = int(self._delivery_timeout_s * 1000)
        producer = open_client(
            kafka.KafkaProducer,
            self._bootstrap,
            timeout_s,
            acks="all",
            enable_idempotence=durable,
            # Without idempotence only one request in flight keeps the order when one is repeated.
            max_in_flight_requests_per_connection=5 if durable else 1,
            delivery_timeout_ms=delivery_ms,
            request_timeout_ms=min(delivery_ms, 30_000),
            max_block_ms=min(delivery_ms, 5_000),
            max_request_size=MAX_RECORD_BYTES + _ENVELOPE_BYTES,
            batch_size=1024 * 1024,
        )
        return _ProducerLink(producer, self._bootstrap)


class _ConsumerLink:
    """LogLink over a KafkaConsumer."""

    def __init__(self, consumer: Any, bootstrap: str, topic: str, partitions: list[int]) -> None:
        self._consumer = consumer
        self._bootstrap = bootstrap
        self._topic = topic
        self._tp = {p: kafka.TopicPartition(topic, p) for p in partitions}

    def fetch(self, timeout_s: float, max_records: int) -> dict[int, list[Record]]:
        with _translated(self._bootstrap):
            fetched = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        return {
            tp.partition: [Record(tp.partition, r.offset, r.timestamp, r.key, r.value or b"") for r in records]
            for tp, records in fetched.items()
        }

    def seek(self, partition: int, offset: int) -> None:
        self._consumer.seek(self._tp[partition], offset)
        self._consumer._subscription.assignment[self._tp[partition]].highwater = None

    def position(self, partition: int) -> int:
        with _translated(self._bootstrap):
            return int(self._consumer.position(self._tp[partition], timeout_ms=0))

    def highwater(self, partition: int) -> int | None:
        offset: int | None = self._consumer.highwater(self._tp[partition])
        return offset

    def earliest(self, timeout_s: float) -> dict[int, int]:
        with _translated(self._bootstrap):
            found = self._consumer.beginning_offsets(list(self._tp.values()), timeout_ms=timeout_s * 1000)
        return {tp.partition: offset for tp, offset in found.items()}

    def identity(self) -> str | None:
        cluster = self._consumer._cluster
        topic_id = cluster.topic_id(self._topic)
        return None if topic_id is None else f"{cluster.cluster_id}/{topic_id}"

    def refresh_identity(self, timeout_s: float) -> bool:
        manager = self._consumer._manager
        try:
            manager.run(manager.wait_for, manager.cluster.request_update(), timeout_s * 1000)
        except kafka_errors.KafkaError:
            return False
        return True

    def connections(self) -> list[object]:
        return [c for c in list(self._consumer._manager._conns.values()) if c.connected]

    def hold_fetches(self, wait_ms: int) -> None:
        self._consumer._fetcher.config["fetch_max_wait_ms"] = wait_ms

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class _ProducerLink:
    """SendLink over a KafkaProducer."""

    def __init__(self, producer: Any, bootstrap: str) -> None:
        self._producer = producer
        self._bootstrap = bootstrap
        self._broken = False

    def send(self, record: Outgoing, settle: Callable[[int | TrirankError], None]) -> None:
        try:
            with _translated(self._bootstrap):
                ack = self._producer.send(record.topic, value=record.value, key=record.key, partition=record.partition)
        except (ValueError, TypeError, AssertionError) as error:
            raise Permanent(f"log: {record.topic}[{record.partition}] does not take the record: {error}") from error
        ack.add_callback(lambda written: settle(written.offset))
        ack.add_errback(lambda error: settle(self._failure(error)))

    def broken(self) -> bool:
        return self._broken

    def close(self, timeout_s: float) -> None:
        try:
            self._producer.close(timeout=timeout_s)
        except kafka_errors.KafkaTimeoutError:
            self._producer._sender.force_close()
            self._producer._sender.join(TIMEOUT_S)
            self._producer._closed = True

    def _failure(self, error: Exception) -> TrirankError:
        # Unknown or fenced producer, failed InitProducerId, ...: an idempotent producer never sends again after these.
        self._broken |= "Producer" in f"{type(error).__name__} {error}"
        self._broken |= isinstance(error, kafka_errors.OutOfOrderSequenceNumberError)
        return _our_error(self._bootstrap, error)


def _partitions(consumer: Any, topic: str, timeout_s: float) -> set[int]:
    """Of a topic, asked for with a limit: kafka-python's own question has none, and would wait for ever for an answer
    that went astray. Raises KafkaTimeoutError."""
    cluster, manager = consumer._cluster, consumer._manager
    if cluster.partitions_for_topic(topic) is None:
        manager.run(manager.wait_for, cluster.request_update(), timeout_s * 1000)
    return cluster.partitions_for_topic(topic) or set()


@contextmanager
def _admin(bootstrap: str, timeout_s: float) -> Iterator[Any]:
    admin = open_client(kafka.KafkaAdminClient, bootstrap, timeout_s)
    try:
        with _translated(bootstrap):
            yield admin
    finally:
        admin.close()


@contextmanager
def _translated(bootstrap: str) -> Iterator[None]:
    try:
        yield
    except kafka_errors.KafkaError as error:
        raise _our_error(bootstrap, error) from error


def _our_error(bootstrap: str, error: Exception) -> TrirankError:
    if isinstance(error, kafka_errors.OffsetOutOfRangeError):
        return OutOfRange({tp.partition for tp in error.args[0]})
    if isinstance(error, kafka_errors.LogTruncationError):
        return OutOfRange({tp.partition for tp in error.divergent_offsets})
    if isinstance(error, kafka_errors.MessageSizeTooLargeError | kafka_errors.RecordListTooLargeError):
        return Permanent(f"log: the record is too large (at most {MAX_RECORD_BYTES} bytes)")
    return LogUnavailable(f"log at {bootstrap}: {type(error).__name__}: {error}")
