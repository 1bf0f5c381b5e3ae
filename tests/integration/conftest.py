"""What tests with real servers share: a broker, a Redis and a small release for each module, topics for each test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.redis import connect
from infra.release import Release
from tests.integration.shards import Topics, make_release, make_topics
from tests.support import ready

if TYPE_CHECKING:
    from tests.two_releases import TwoReleases


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with ready(EmbeddedBroker(tmp_path_factory.mktemp("broker"))) as server:
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with ready(EmbeddedRedis(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def url(redis: EmbeddedRedis) -> str:
    """The address of the module's Redis, with nothing in it."""
    with connect(redis.url) as client:
        client.flushall()
    return redis.url


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("release") / "r1")


@pytest.fixture
def topics(broker: EmbeddedBroker) -> Topics:
    return make_topics(broker.bootstrap)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoReleases]:
    """Two releases behind a gateway."""
    from tests.two_releases import TwoReleases

    running = TwoReleases(tmp_path)
    try:
        yield running.start()
    finally:
        running.stack.stop()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Runs a coroutine in each of the event loops that are used."""
    import uvloop

    return {"asyncio": asyncio.run, "uvloop": uvloop.run}[request.param]


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    """A Unix socket's address."""
    return f"ipc://{tmp_path / 's'}"
