from __future__ import annotations

import asyncio
import socket

import pytest
import redis

from infra.errors import RedisRefused, RedisUnavailable
from infra.redis import connect, connect_async, ping, redis_errors
from tests.support import free_port


def test_a_port_nobody_listens_on_is_a_refusal() -> None:
    with pytest.raises(RedisRefused):
        ping(f"redis://127.0.0.1:{free_port()}")


def test_it_is_one_for_asyncio_too() -> None:
    async def ask() -> None:
        client = connect_async(f"redis://127.0.0.1:{free_port()}")
        try:
            with redis_errors():
                await client.ping()
        finally:
            await client.aclose()

    with pytest.raises(RedisRefused):
        asyncio.run(ask())


def test_a_server_that_says_it_is_loading_is_one() -> None:
    with pytest.raises(RedisRefused), redis_errors():
        raise redis.BusyLoadingError("LOADING Redis is loading the dataset in memory")


def test_silence_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RedisUnavailable) as raised, redis_errors(), connect(url) as client:
            client.ping()
    assert not isinstance(raised.value, RedisRefused)
