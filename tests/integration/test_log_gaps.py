"""Retention takes records a shard had not applied: it says so, serves, refuses freshness, goes on from its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.release import Release
from param_server.contract import Op
from param_server.routing import partition_of
from tests.brokers import Broker, delete_records, make_broker
from tests.integration.shards import (
    N_PARTITIONS,
    Caller,
    ShardProcess,
    Topics,
    ask_snapshot,
    asking,
    make_release,
    make_topics,
    publish,
    publishing,
    running,
    shard_config,
)
from tests.support import eventually

PARTITION = int(partition_of(np.array([3]), N_PARTITIONS)[0])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    server = make_broker("apache", tmp_path_factory.mktemp("kafka"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("release") / "r1")


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker.bootstrap)


def add(broker: Broker, topics: Topics, release: Release, times: int) -> None:
    with publishing(broker.bootstrap, topics) as publisher:
        for _ in range(times):
            publish(publisher, release, [3], 1.0, op=Op.ADD)


def standing(caller: Caller) -> tuple[bool, int, int]:
    """Whether it claims to be complete, how many gaps it counted, and its position."""
    health = caller.health()
    positions = {int(p): at for p, at in health["positions"].items()}
    return health["complete"], health["log_truncations"], positions[PARTITION]


def test_a_shard_that_was_away_too_long_serves_its_snapshot_and_refuses_freshness(
    broker: Broker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    add(broker, topics, release, 2)
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: caller.value(3) == 5.0)
    add(broker, topics, release, 3)
    delete_records(broker.bootstrap, topics.embeddings, PARTITION, before=4)
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: standing(caller) == (False, 1, 5))
        assert caller.value(3) == 6.0
        ask_snapshot(caller)
    # What is lost stays known through further restarts.
    with running(config, release) as address, asking(release, address) as caller:
        assert standing(caller) == (False, 1, 5)
        assert caller.value(3) == 6.0


def test_a_shard_killed_before_its_first_snapshot_notices_what_retention_took_meanwhile(
    broker: Broker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    add(broker, topics, release, 1)
    process = ShardProcess(config, release)
    try:
        with asking(release, process.address) as caller:
            eventually(lambda: caller.health()["snapshot"]["kind"] == "start")
            eventually(lambda: caller.value(3) == 4.0)
            add(broker, topics, release, 3)
            eventually(lambda: caller.value(3) == 7.0)
    finally:
        process.kill()
    delete_records(broker.bootstrap, topics.embeddings, PARTITION, before=3)
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: standing(caller) == (False, 1, 4))
        assert caller.value(3) == 4.0


def test_a_shard_that_begins_on_an_old_log_begins_where_the_log_does(
    broker: Broker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    add(broker, topics, release, 3)
    delete_records(broker.bootstrap, topics.embeddings, PARTITION, before=2)
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: standing(caller) == (True, 0, 3))
        assert caller.value(3) == 4.0
