"""Many callers on one connection to Redis: commands are written as they come, replies belong to them in order.

A request pays one write and one read, without a pool, locks or a timer thread. Only for commands that may be repeated:
one that finds its connection dead (Redis was restarted) is sent again over a new one, once. Invariant: whoever gives up
leaves its place in the queue, so that no reply ever goes to another caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis

from infra.deadline import Deadline
from infra.errors import RedisUnavailable
from infra.redis import TIMEOUT_S, Handle, open_connection


class RedisLine:
    """One connection, made at the first command and again when it is lost. For one event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._link: _Link | None = None
        self._opening = asyncio.Lock()

    async def ask(self, packed: bytes, n: int, deadline: Deadline) -> list[Any]:
        """The `n` replies to `packed`, which holds that many commands. Raises RedisUnavailable."""
        try:
            link = self._link
            if link is None or link.lost:
                link = await self._open(deadline)
            try:
                replies = await link.ask(packed, n, deadline)
            except ConnectionError:
                link = await self._open(deadline)
                replies = await link.ask(packed, n, deadline)
        except (OSError, TimeoutError) as error:
            raise RedisUnavailable(f"redis: {type(error).__name__}: {error}") from error
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise RedisUnavailable(f"redis: {reply}")
        return replies

    async def close(self) -> None:
        """Close the connection; callers that still wait fail."""
        if self._link is not None:
            await self._link.close()
            self._link = None

    async def _open(self, deadline: Deadline) -> _Link:
        async with asyncio.timeout(max(0.0, deadline.remaining_s())), self._opening:
            if self._link is not None:
                if not self._link.lost:
                    return self._link
                await self._link.close()
                self._link = None
            handle = await open_connection(self._url)
            self._link = _Link(handle)
            return self._link


class _Link(asyncio.Protocol):
    """A connection that stands, or has stood."""

    def __init__(self, handle: Handle) -> None:
        self.lost = False
        self._handle = handle
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int]] = deque()
        self._replies: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._heard_s = 0.0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        handle.transport.set_protocol(self)

    async def ask(self, packed: bytes, n: int, deadline: Deadline) -> list[Any]:
        """Raises ConnectionError when the connection is lost, TimeoutError at the deadline."""
        left_s = deadline.remaining_s()
        if left_s <= 0:
            raise TimeoutError("no time left to ask")
        now_s = self._loop.time()
        if not self._waiting:
            self._heard_s = now_s
        elif now_s - self._heard_s > TIMEOUT_S:
            self._lose()
        if self.lost:
            raise ConnectionError("the connection is lost")
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiting.append((future, n))
        self._handle.transport.write(packed)
        timer = self._loop.call_later(left_s, _give_up, future)
        try:
            return await future
        finally:
            timer.cancel()

    async def close(self) -> None:
        self._lose()
        await self._ended
        await self._handle.close()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._take(reply)
        except hiredis.ProtocolError:
            self._lose()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose()
        if not self._ended.done():
            self._ended.set_result(None)

    def _take(self, reply: Any) -> None:
        if not self._waiting:
            # What nobody asked for: nothing after it could be told apart.
            self._lose()
            return
        self._replies.append(reply)
        future, n = self._waiting[0]
        if len(self._replies) == n:
            self._waiting.popleft()
            if not future.done():
                future.set_result(self._replies)
            self._replies = []

    def _lose(self) -> None:
        self.lost = True
        self._handle.transport.abort()
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError("the connection was lost"))


def _give_up(future: asyncio.Future[list[Any]]) -> None:
    if not future.done():
        future.set_exception(TimeoutError("no reply in time"))
