"""What tests with real shards share: a broker and a small release for each module, topics for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.embedded import EmbeddedBroker
from infra.release import Release
from tests.integration.shards import Topics, make_release, make_topics


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    server = EmbeddedBroker(tmp_path_factory.mktemp("broker"))
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("release") / "r1")


@pytest.fixture
def topics(broker: EmbeddedBroker) -> Topics:
    return make_topics(broker.bootstrap)
