"""Brokers for tests: the embedded one and Apache Kafka, started, killed and started again on the same port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

import pytest

from infra import kafka as seam
from infra.embedded import EmbeddedBroker
from infra.errors import LogUnavailable
from infra.kafka import LogConsumer, LogGap, LogProducer, Record, probe
from tests.support import eventually, free_port

KAFKA_HOME_VARIABLE = "TEST_KAFKA_HOME"


class Broker(Protocol):
    """What a test may do with a broker."""

    durable: bool
    bootstrap: str

    def kill(self) -> None:
        """kill -9."""

    def start(self) -> None:
        """Start, on the same port and directory, and wait until it answers."""

    def stop(self) -> None:
        """End it."""


class Embedded:
    """The embedded broker."""

    durable = False

    def __init__(self, directory: Path) -> None:
        self._server = EmbeddedBroker(directory)
        self.bootstrap = ""

    def start(self) -> None:
        """Start and wait."""
        self._server.start()
        self._server.wait_ready()
        self.bootstrap = self._server.bootstrap

    def kill(self) -> None:
        """kill -9."""
        pid = self._server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self._server.alive())

    def stop(self) -> None:
        """End it."""
        self._server.stop()


class Apache:
    """One Apache Kafka broker in KRaft mode, from a folder with `broker.sh` and `libs/`."""

    durable = True

    def __init__(self, home: Path, directory: Path) -> None:
        self._home = home
        self._directory = directory
        self._port, self._controller_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.bootstrap = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start and wait."""
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [self._home / "broker.sh", self._directory, str(self._port), str(self._controller_port)]
        # On a busy machine a broker misses its heartbeats for seconds, and its topics are then without a leader.
        command.append("broker.session.timeout.ms=6000")
        with (self._directory / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        # A Java process beside full cores takes a minute and more.
        try:
            eventually(self._answers, timeout_s=240)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it."""
        self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the broker ended; see {self._directory}/broker.log"
        try:
            return bool(probe(self.bootstrap, 1.0).cluster_id)
        except LogUnavailable:
            return False


def kafka_home() -> Path:
    """Folder of Apache Kafka; skips the test, with the reason, when there is none."""
    named = os.environ.get(KAFKA_HOME_VARIABLE)
    home = Path(named) if named else Path(__file__).parents[2] / "shared" / "kafka"
    if not (home / "broker.sh").is_file() or not (home / "libs").is_dir():
        pytest.skip(f"no Apache Kafka: set {KAFKA_HOME_VARIABLE} to a folder with broker.sh and libs/")
    if shutil.which("java") is None:
        pytest.skip("no Apache Kafka: it needs Java 17 or later (`java` is not on the PATH)")
    return home


def delete_topic(bootstrap: str, topic: str) -> None:
    """Delete a topic and wait until it is gone."""
    with contextlib.closing(seam.kafka.KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.delete_topics([topic])
        eventually(lambda: admin.describe_topics([topic])[0]["error_code"], timeout_s=20)


def delete_records(bootstrap: str, topic: str, partition: int, *, before: int) -> None:
    """Let the log begin at the offset `before`, as retention does."""
    with contextlib.closing(seam.kafka.KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.delete_records({seam.kafka.TopicPartition(topic, partition): before})


def make_broker(kind: str, directory: Path) -> Broker:
    """A started broker, `embedded` or `apache`."""
    broker: Broker = Embedded(directory) if kind == "embedded" else Apache(kafka_home(), directory)
    broker.start()
    return broker


def read(consumer: LogConsumer, n: int, timeout_s: float = 20.0) -> list[Record]:
    """Exactly the next n records."""
    records: list[Record] = []
    end = time.monotonic() + timeout_s
    while len(records) < n and time.monotonic() < end:
        records += consumer.poll(0.2, max_records=n - len(records))
    assert len(records) == n
    return records


def send(producer: LogProducer, topic: str, values: list[bytes], partition: int = 0) -> list[int]:
    """Offsets of acknowledged records."""
    return [f.result(20) for f in [producer.send(topic, partition, v) for v in values]]


def gap_of(consumer: LogConsumer) -> LogGap:
    """The gap that polling raises, however long the reconnect takes."""

    def polled() -> LogGap | None:
        try:
            consumer.poll(0.2)
        except LogGap as gap:
            return gap
        return None

    return eventually(polled, timeout_s=20)
