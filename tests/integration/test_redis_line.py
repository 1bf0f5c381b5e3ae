"""One connection for many callers: order, giving up, a server that dies, is stuck, or wants a password."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest

from infra.deadline import Deadline
from infra.embedded import EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.redis import connect
from infra.redis_line import RedisLine
from tests.support import ready


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with ready(EmbeddedRedis(tmp_path)) as redis:
        yield redis


def command(*parts: str | int) -> bytes:
    packed: bytes = hiredis.pack_command(parts)  # type: ignore[arg-type]
    return packed


def on(url: str, use: Callable[[RedisLine], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        line = RedisLine(url)
        try:
            return await use(line)
        finally:
            await line.close()

    return asyncio.run(go())


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


def test_every_caller_gets_his_own_replies(server: EmbeddedRedis) -> None:
    async def use(line: RedisLine) -> list[Any]:
        asked = (line.ask(command("ECHO", i) + command("ECHO", -i), 2, soon()) for i in range(500))
        return list(await asyncio.gather(*asked))

    assert on(server.url, use) == [[str(i).encode(), str(-i).encode()] for i in range(500)]


def test_the_reply_to_one_who_gave_up_goes_to_nobody_else(server: EmbeddedRedis) -> None:
    async def use(line: RedisLine) -> list[Any]:
        await line.ask(command("PING"), 1, soon())
        given_up = asyncio.create_task(line.ask(command("ECHO", "one"), 1, soon()))
        await asyncio.sleep(0)
        given_up.cancel()
        return await line.ask(command("ECHO", "two"), 1, soon())

    assert on(server.url, use) == [b"two"]


def test_a_server_that_was_restarted_is_asked_again_over_a_new_connection(server: EmbeddedRedis) -> None:
    async def use(line: RedisLine) -> list[Any]:
        await line.ask(command("PING"), 1, soon())
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(server.restart)
        return await line.ask(command("ECHO", "back"), 1, soon())

    assert on(server.url, use) == [b"back"]


def test_a_server_that_hangs_is_unavailable_at_the_deadline_and_used_again_when_it_wakes(server: EmbeddedRedis) -> None:
    async def use(line: RedisLine) -> list[Any]:
        await line.ask(command("PING"), 1, soon())
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RedisUnavailable, match="no reply in time"):
                await line.ask(command("ECHO", "lost"), 1, soon(0.05))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        return await line.ask(command("ECHO", "found"), 1, soon())

    assert on(server.url, use) == [b"found"]


@pytest.mark.parametrize("asked", [command("NONSENSE"), command("AUTH", "a", "b")])
def test_an_error_reply_is_unavailable_and_the_connection_goes_on(server: EmbeddedRedis, asked: bytes) -> None:
    async def use(line: RedisLine) -> list[Any]:
        with pytest.raises(RedisUnavailable, match=r"ERR|WRONGPASS"):
            await line.ask(asked + command("PING"), 2, soon())
        return await line.ask(command("PING"), 1, soon())

    assert on(server.url, use) == [b"PONG"]


def test_no_server_or_no_time_is_unavailable(server: EmbeddedRedis) -> None:
    async def ping(line: RedisLine) -> None:
        with pytest.raises(RedisUnavailable):
            await line.ask(command("PING"), 1, soon(0.0))
        await line.ask(command("PING"), 1, soon())

    on(server.url, ping)
    with pytest.raises(RedisUnavailable):
        on("redis://127.0.0.1:1/0", lambda line: line.ask(command("PING"), 1, soon()))


def test_password_and_database_of_the_url_are_used(server: EmbeddedRedis) -> None:
    with connect(server.url) as client:
        client.config_set("requirepass", "secret")
    try:
        with pytest.raises(RedisUnavailable, match=r"[Aa]uth"):
            on(server.url, lambda line: line.ask(command("PING"), 1, soon()))
        place = server.url.removeprefix("redis://").split("/")[0]
        url = f"redis://:secret@{place}/3"
        assert on(url, lambda line: line.ask(command("CLIENT", "INFO"), 1, soon()))[0].count(b" db=3 ") == 1
    finally:
        with connect(f"redis://:secret@{server.url.removeprefix('redis://')}") as client:
            client.config_set("requirepass", "")
