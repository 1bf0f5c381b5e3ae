"""Replicas of a shard over one cold tier: kills of either lose nothing, and what one has lost no other claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.clock import SystemClock
from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.release import Release
from param_server.config import ShardConfig
from param_server.contract import F32, Op, TableSpec
from param_server.generation import Place
from param_server.holding import TierRules
from param_server.table import RowBatch
from param_server.table.evicting import bytes_for
from param_server.tiering import Tiering, Tiers
from param_server.tiers import TieredTable
from param_server.updates import Progress
from tests.integration.shards import DIM, Topics, ask_snapshot, asking, make_release, publish, publishing, running
from tests.integration.shards import shard_config as plain_config
from tests.integration.test_tiers import tiers_of, values
from tests.support import eventually

SPEC = TableSpec("item", 4, DIM, 1000, np.zeros(DIM, np.float32))
PLACE = Place(0, 1, 4)


@pytest.fixture
def configs(broker: EmbeddedBroker, redis: EmbeddedRedis, topics: Topics, tmp_path: Path) -> list[ShardConfig]:
    """Two replicas of one shard, each with room for a few of its rows."""
    tiers = Tiering(
        hot_bytes=2 * bytes_for(10, DIM), redis_url=redis.url, stack=topics.embeddings,
        rules=TierRules(negative_ttl_s=0.05), hot_list_interval_s=0.2,
    )  # fmt: skip
    first = replace(plain_config(tmp_path, broker.bootstrap, topics), tiers=tiers)
    return [first, replace(first, replica=1, name="shard-0-r1", bind=f"ipc://{tmp_path}/r1.sock")]


def test_both_replicas_have_every_row_and_take_none_for_older_than_it_is(
    broker: EmbeddedBroker, release: Release, topics: Topics, configs: list[ShardConfig]
) -> None:
    keys = list(range(50))
    with running(configs[0], release) as first, running(configs[1], release) as second:
        with publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, keys, 1000.0, op=Op.ADD)
            publish(publisher, release, keys[::2], 0.0, op=Op.DELETE)
            publish(publisher, release, keys[::4], 7.0)
        expected = {key: 1000.0 + key for key in keys[1::2]} | dict.fromkeys(keys[::4], 7.0)
        for address in (first, second):
            with asking(release, address) as caller:
                for key in keys:
                    row = {key: expected[key]} if key in expected else {}
                    eventually(lambda key=key, row=row, caller=caller: values(caller, [key]) == row, timeout_s=30)
                health = caller.health()
                assert health["complete"]
                assert health["tiers"]["cold_losses"] == 0


def test_only_the_first_replica_notes_the_rows_asked_for_most(release: Release, configs: list[ShardConfig]) -> None:
    with running(configs[0], release) as first, running(configs[1], release) as second:
        with asking(release, first) as one, asking(release, second) as other:
            eventually(lambda: tiers_of(one)["lists_written"] > 0)
            eventually(lambda: tiers_of(other)["warm"])
            before = tiers_of(one)["lists_written"]
            eventually(lambda: tiers_of(one)["lists_written"] > before + 2)
            assert tiers_of(other)["lists_written"] == 0


def test_another_release_of_the_same_stack_takes_its_own_empty_cold_tier_for_no_loss(
    release: Release, configs: list[ShardConfig], tmp_path: Path
) -> None:
    with running(configs[0], release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["cold_connected"])
        ask_snapshot(caller)
    other = make_release(tmp_path / "r2", "r2")
    assert other.manifest.generation != release.manifest.generation
    for served in (other, release):
        with running(configs[0], served) as address, asking(served, address) as caller:
            eventually(lambda caller=caller: tiers_of(caller)["cold_connected"])
            eventually(lambda caller=caller: values(caller, [49]) == {49: 49.0})
            assert tiers_of(caller)["cold_losses"] == 0
            assert caller.health()["complete"]


class Replica:
    """The tiers of one replica, turned by hand; `lost`: whether it has lost updates."""

    def __init__(self, config: Tiering, folder: Path, replica: int) -> None:
        self.lost = False
        self.tiers = Tiers(config, folder, 1, PLACE, SystemClock(), replica=replica)
        self.tiers.start()
        table = self.tiers.tables({"item": SPEC})["item"]
        assert isinstance(table, TieredTable)
        self.table = table
        self.tiers.follow({p: Progress() for p in range(PLACE.n_partitions)}, complete=True)
        eventually(lambda: self.turned() and self.tiers.health()["cold_connected"])

    def turned(self) -> bool:
        self.tiers.turn(complete=not self.lost)
        return True

    def write(self, keys: range, version: int) -> None:
        """Rows of these keys, until those that find no room are down."""
        rows: F32 = np.ones((len(keys), DIM), np.float32)
        self.table.apply(RowBatch(Op.ASSIGN, np.array(keys), np.full(len(keys), version, np.uint64), rows))
        eventually(lambda: self.turned() and not self.table.leaving and not self.table.waiting)

    def complete(self) -> bool:
        return bool(self.tiers.health_of_shard(True)["complete"])


@contextmanager
def replicas(redis: EmbeddedRedis, folder: Path, stack: str) -> Iterator[list[Replica]]:
    config = Tiering(hot_bytes=bytes_for(10, DIM), redis_url=redis.url, stack=stack)
    both = [Replica(config, folder, replica) for replica in (0, 1)]
    try:
        yield both
    finally:
        for each in both:
            each.tiers.stop()


def test_rows_of_a_replica_that_lost_updates_make_whoever_reads_them_incomplete(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    with replicas(redis, tmp_path, "gaps") as (one, other):
        one.write(range(40), 5)
        other.table.lookup(np.arange(40))
        eventually(lambda: other.turned() and other.tiers.health()["tables"]["item"]["cold"]["filled"] > 0)
        assert one.complete()
        assert other.complete()
        one.lost = True
        one.turned()
        one.write(range(40, 80), 6)
        assert not one.complete()
        other.table.lookup(np.arange(40, 80))
        eventually(lambda: other.turned() and not other.complete())
        assert not other.tiers.health()["cold_complete"]
    # And it stays so: the rows are still there.
    with replicas(redis, tmp_path, "gaps") as (one, other):
        assert not one.complete()
        assert not other.complete()
