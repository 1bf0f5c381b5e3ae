"""The directory over a real Redis: announced, found, left, and kept through the death of Redis."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from infra.directory import Announcer, DirectoryReader, Entry, read_directory
from infra.embedded import EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.redis import connect, server_pid
from infra.tasks import ended
from tests.support import eventually, free_port, ready

STACK = "test"
ENTRY = Entry("edge", "edge-0", "ipc:///run/edge-0", "r1", 1, os.getpid(), "host", {"public_key": None, "n": 3})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with ready(EmbeddedRedis(tmp_path / "redis")) as redis:
        yield redis


@contextmanager
def announced(url: str, entry: Entry = ENTRY, interval_s: float = 0.05) -> Iterator[Announcer]:
    announcer = Announcer(url, STACK, lambda: entry, interval_s)
    announcer.start()
    try:
        yield announcer
    finally:
        announcer.stop()


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[list[list[Entry]]]:
    """Every list of entries that a watcher was given."""
    seen: list[list[Entry]] = []
    watching = asyncio.create_task(DirectoryReader(url, STACK).watch(seen.append, interval_s=0.02))
    try:
        yield seen
    finally:
        await ended(watching)


async def comes_true(probe: Callable[[], object]) -> None:
    assert await asyncio.to_thread(eventually, lambda: bool(probe()), timeout_s=20)


def test_an_entry_is_found_as_announced_and_goes_at_once_when_it_leaves(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with watched(server.url) as seen:
            await comes_true(lambda: seen == [[]])
            announcer = Announcer(server.url, STACK, lambda: ENTRY, 0.05)
            announcer.start()
            await comes_true(lambda: seen == [[], [ENTRY]])
            assert await asyncio.to_thread(read_directory, server.url, STACK) == [ENTRY]
            assert await asyncio.to_thread(read_directory, server.url, "another") == []
            await asyncio.to_thread(announcer.stop)
            assert await asyncio.to_thread(read_directory, server.url, STACK) == []
            await comes_true(lambda: seen == [[], [ENTRY], []])

    asyncio.run(main())


def test_a_change_of_the_entry_is_seen(server: EmbeddedRedis) -> None:
    generation = [1]
    announcer = Announcer(server.url, STACK, lambda: replace(ENTRY, generation=generation[0]), 0.05)
    announcer.start()
    eventually(lambda: read_directory(server.url, STACK) == [ENTRY])
    generation[0] = 2
    eventually(lambda: read_directory(server.url, STACK) == [replace(ENTRY, generation=2)])
    announcer.stop()


def test_a_predecessor_that_leaves_late_does_not_take_its_successor_along(server: EmbeddedRedis) -> None:
    successor = replace(ENTRY, pid=ENTRY.pid + 1, address="ipc:///run/other")
    with announced(server.url, interval_s=600) as old:
        eventually(lambda: read_directory(server.url, STACK) == [ENTRY])
        with announced(server.url, successor):
            eventually(lambda: read_directory(server.url, STACK) == [successor])
            old.stop()
            assert read_directory(server.url, STACK) == [successor]


def test_a_process_that_dies_without_a_word_is_gone_after_three_seconds(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with watched(server.url) as seen:
            await comes_true(lambda: seen[-1:] == [[ENTRY]])
            await comes_true(lambda: seen[-1:] == [[]])
            assert read_directory(server.url, STACK) == []

    # Announces once and then never again, like a process that was killed.
    with announced(server.url, interval_s=600):
        asyncio.run(main())


@pytest.mark.parametrize("loses_its_data", [False, True])
def test_entries_outlive_redis_and_are_announced_again_when_it_is_back(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture, loses_its_data: bool
) -> None:
    failures = 0

    def failing() -> bool:
        return sum("cannot be read" in record.message for record in caplog.records) > failures

    async def main() -> None:
        async with watched(server.url) as seen:
            await comes_true(lambda: seen[-1:] == [[ENTRY]])
            before = len(seen)
            os.kill(server_pid(server.url), signal.SIGKILL)
            await comes_true(failing)
            with pytest.raises(RedisUnavailable):
                await asyncio.to_thread(read_directory, server.url, STACK)
            if loses_its_data:
                for file in server.directory.glob("*.aof"):
                    file.unlink()
                shutil.rmtree(server.directory / "appendonlydir", ignore_errors=True)
            await asyncio.to_thread(server.restart)
            await comes_true(lambda: read_directory(server.url, STACK) == [ENTRY])
            assert seen[before:] == []

    with caplog.at_level(logging.WARNING), announced(server.url):
        asyncio.run(main())


def test_an_announcer_started_before_redis_announces_when_redis_comes(tmp_path: Path) -> None:
    port = free_port()
    with announced(f"redis://127.0.0.1:{port}/0"):
        with ready(EmbeddedRedis(tmp_path / "redis", port)) as redis:
            eventually(lambda: read_directory(redis.url, STACK) == [ENTRY])


def test_an_entry_that_cannot_be_made_is_tried_again(server: EmbeddedRedis) -> None:
    failed = threading.Event()

    def make() -> Entry:
        if not failed.is_set():
            failed.set()
            raise ValueError("not yet")
        return ENTRY

    announcer = Announcer(server.url, STACK, make, 0.05)
    announcer.start()
    eventually(lambda: read_directory(server.url, STACK) == [ENTRY])
    announcer.stop()


def test_what_is_not_an_entry_is_passed_over_and_the_dead_are_swept(server: EmbeddedRedis) -> None:
    with connect(server.url) as client:
        key = f"{STACK}:directory"
        client.hset(key, mapping={"edge/x": "garbage", "edge/y": "99|{}", "edge/z": b"\xff|\xff"})
        assert read_directory(server.url, STACK) == []
        with announced(server.url):
            eventually(lambda: read_directory(server.url, STACK) == [ENTRY])
            eventually(lambda: client.hkeys(key) == [b"edge/edge-0"])
