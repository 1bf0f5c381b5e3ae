"""The seam to Redis: connections with short timeouts, and its errors translated into ours.

Refuses to wait: a Redis that does not answer within a second counts as away. Invariant: no exception of the redis
package leaves a block wrapped in `redis_errors`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.errors import RedisRefused, RedisUnavailable

TIMEOUT_S = 1.0


def connect(url: str) -> redis.Redis:
    """A synchronous client for `url`; connects at the first command, raises nothing by itself."""
    return redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    )


def connect_async(url: str) -> redis.asyncio.Redis:
    """An asyncio client for `url`; connects at the first command, raises nothing by itself."""
    return redis.asyncio.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=AsyncRetry(NoBackoff(), 0)
    )


class Handle:
    """A connection of the redis package that has greeted the server and is handed to a protocol of ours."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.transport: Any = connection._writer.transport

    async def close(self) -> None:
        """Close it; may be called twice."""
        await self._connection.disconnect(nowait=True)


async def open_connection(url: str) -> Handle:
    """A connection made as `url` says (password, database, TLS), speaking RESP2. Raises OSError."""
    pool = redis.asyncio.ConnectionPool.from_url(
        url,
        protocol=2,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=AsyncRetry(NoBackoff(), 0),
    )
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    try:
        await connection.connect()
    except redis.RedisError as error:
        await connection.disconnect(nowait=True)
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    return Handle(connection)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn every error of the redis package into RedisUnavailable; works around awaits too."""
    try:
        yield
    except (redis.RedisError, OSError, TimeoutError) as error:
        kind = RedisRefused if _is_refusal(error) else RedisUnavailable
        raise kind(f"redis: {type(error).__name__}: {error}") from error


def _is_refusal(error: BaseException) -> bool:
    """Whether the server's machine refused the connection, or the server said that it is loading."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionRefusedError, redis.BusyLoadingError)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def ping(url: str) -> None:
    """Ask a server whether it is ready. Raises RedisUnavailable, within about a second."""
    with redis_errors(), connect(url) as client:
        client.ping()


def shared_secret(url: str, key: str) -> bytes:
    """32 random bytes that every process of a stack has, made by the first that asks. Raises RedisUnavailable."""
    with redis_errors(), connect(url) as client:
        client.set(key, secrets.token_bytes(32), nx=True)
        found: bytes | None = client.get(key)
    if found is None:
        raise RedisUnavailable(f"redis: {key} was not kept; is its memory full?")
    return found


def server_pid(url: str) -> int:
    """Process id of the server that answers at `url`. Raises RedisUnavailable while it loads or is away."""
    with redis_errors(), connect(url) as client:
        # INFO is answered while the server still loads its file, PING is not.
        client.ping()
        return int(client.info("server")["process_id"])
