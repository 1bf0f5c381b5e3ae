"""The embedded Redis and broker: ready when they say so, never on a taken port, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.embedded import EmbeddedBroker, EmbeddedRedis, EmbeddedServer
from infra.errors import ConfigurationError, LogUnavailable, RedisUnavailable
from infra.kafka import LogProducer, ensure_topics, probe, topic_identity
from infra.lifecycle import alive
from infra.redis import connect, ping
from tests.support import eventually, free_port

KINDS = [EmbeddedRedis, EmbeddedBroker]


def answers(server: EmbeddedServer) -> bool:
    """Whether somebody serves there."""
    try:
        if isinstance(server, EmbeddedRedis):
            ping(server.url)
        else:
            assert isinstance(server, EmbeddedBroker)
            probe(server.bootstrap, 0.5)
    except (RedisUnavailable, LogUnavailable):
        return False
    return True


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    made: EmbeddedServer = request.param(tmp_path / "server")
    yield made
    made.stop()


def test_a_server_answers_once_it_is_ready_and_no_more_once_it_is_stopped(server: EmbeddedServer) -> None:
    server.start()
    server.wait_ready()
    assert server.alive()
    assert answers(server)
    pid = server.pid
    assert pid is not None
    server.stop()
    server.stop()
    assert not server.alive()
    assert server.pid is None
    assert not alive(pid)
    assert not answers(server)


def test_it_listens_on_loopback_only(server: EmbeddedServer) -> None:
    server.start()
    server.wait_ready()
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f"{server.port:04X}"
    addresses = {f[1].split(":")[0] for f in listening if f[3] == "0A" and f[1].endswith(f":{port}")}
    assert addresses == {"0100007F"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_taken_port_is_an_error_that_says_what_to_do(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = kind(tmp_path, port=other.getsockname()[1])
        with pytest.raises(ConfigurationError, match=r"port \d+ .* is taken: stop what listens there.*--(redis|kafka)"):
            server.start()
        assert not server.alive()


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_taken_between_the_check_and_the_start_is_the_same_error(
    kind: type[EmbeddedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kind(tmp_path / "first", port=free_port())
    first.start()
    first.wait_ready()
    second = kind(tmp_path / "second", port=first.port)
    with monkeypatch.context() as patch:
        patch.setattr("infra.embedded.is_free", lambda port: True)
        second.start()
    try:
        with pytest.raises(ConfigurationError, match="is taken"):
            second.wait_ready()
        assert answers(first)
    finally:
        second.stop()
        first.stop()


def test_after_kill_9_it_is_back_on_the_same_port(server: EmbeddedServer) -> None:
    server.start()
    server.wait_ready()
    port, pid = server.port, server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not server.alive())
    server.restart()
    assert server.port == port
    assert server.pid not in (None, pid)
    assert answers(server)


def test_redis_keeps_what_was_acknowledged_through_kill_9(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    server.wait_ready()
    try:
        with connect(server.url) as client:
            for i in range(1000):
                client.set(str(i), i)
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        server.restart()
        with connect(server.url) as client:
            assert client.dbsize() == 1000
    finally:
        server.stop()


def test_a_broker_is_ready_with_its_topics_and_a_restart_makes_them_anew(tmp_path: Path) -> None:
    server = EmbeddedBroker(tmp_path, topics={"one": 3, "two": 1})
    server.start()
    server.wait_ready()
    try:
        before = topic_identity(server.bootstrap, "one")
        ensure_topics(server.bootstrap, {"one": 3, "two": 1})
        server.restart()
        after = topic_identity(server.bootstrap, "one")
        assert after.split("/")[0] != before.split("/")[0]
        assert not probe(server.bootstrap).durable
    finally:
        server.stop()


def test_a_producer_whose_broker_has_forgotten_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A cluster id like that of a durable broker makes the producer use idempotence, which a new log does not know.
    monkeypatch.setattr("infra.embedded.MEMORY_CLUSTER_PREFIXES", ("like-a-durable-one-",))
    server = EmbeddedBroker(tmp_path, topics={"t": 1})
    server.start()
    server.wait_ready()
    producer = LogProducer(server.bootstrap, delivery_timeout_s=5.0)
    producer.start()
    try:
        assert probe(server.bootstrap).durable
        assert producer.send("t", 0, b"1").result(10) == 0
        server.restart()

        def sent() -> bool:
            try:
                return producer.send("t", 0, b"2").result(10) >= 0
            except LogUnavailable:
                return False

        eventually(sent, timeout_s=20)
        assert "is replaced" in caplog.text
    finally:
        producer.close()
        server.stop()


_PARENT = """
import sys, threading
from pathlib import Path
from infra.embedded import EmbeddedBroker, EmbeddedRedis
servers = [EmbeddedRedis(Path(sys.argv[1])), EmbeddedBroker(Path(sys.argv[1]))]
def start():
    for server in servers:
        server.start()
        server.wait_ready()
# From a thread that ends at once: the children must live on.
starter = threading.Thread(target=start)
starter.start()
starter.join()
print(*(n for server in servers for n in (server.pid, server.port)), flush=True)
threading.Event().wait()
"""


def test_a_crash_of_the_parent_leaves_no_server_behind(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        redis_pid, redis_port, broker_pid, broker_port = map(int, parent.stdout.readline().split())
        ping(f"redis://127.0.0.1:{redis_port}/0")
        probe(f"127.0.0.1:{broker_port}")
        pids = (redis_pid, broker_pid)
        assert all(alive(pid) for pid in pids)
        parent.kill()
    eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    (tmp_path / "appendonly.aof").write_bytes(b"this is no append-only file\r\n" * 9)
    server.start()
    try:
        with pytest.raises(ConfigurationError, match=r"ended with status 1.*redis\.log"):
            server.wait_ready()
    finally:
        server.stop()
