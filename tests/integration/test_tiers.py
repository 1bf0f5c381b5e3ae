"""Shards whose rows do not fit into their memory, with a real Redis below: nothing is lost, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.errors import ReleaseRefused
from infra.release import Release
from param_server.config import ShardConfig
from param_server.contract import Op
from param_server.holding import TierRules
from param_server.publish import Publisher
from param_server.table.evicting import bytes_for
from param_server.tiering import Tiering
from tests.integration.shards import (
    DEFAULT,
    DIM,
    N_ITEMS,
    Caller,
    ShardProcess,
    Topics,
    asking,
    item_row,
    often,
    publish,
    publishing,
    running,
    shard_config,
)
from tests.support import eventually, ready

HOT_ROWS, WARM_ROWS = 10, 6
N_KEYS = 80


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One for each test: it is killed, and loses its rows."""
    with ready(EmbeddedRedis(tmp_path / "redis")) as server:
        yield server


@pytest.fixture
def config(broker: EmbeddedBroker, redis: EmbeddedRedis, topics: Topics, tmp_path: Path) -> ShardConfig:
    # Two tables share each budget.
    tiers = Tiering(
        hot_bytes=2 * bytes_for(HOT_ROWS, DIM),
        warm_bytes=2 * bytes_for(WARM_ROWS, DIM),
        redis_url=redis.url,
        rules=TierRules(negative_ttl_s=0.05),
        hot_list_rows=5,
        hot_list_interval_s=0.2,
    )
    return replace(shard_config(tmp_path, broker.bootstrap, topics), tiers=tiers)


def tiers_of(caller: Caller) -> dict[str, Any]:
    found: dict[str, Any] = caller.health()["tiers"]
    return found


def values(caller: Caller, keys: list[int]) -> dict[int, float]:
    """First numbers of the rows that are found now."""
    got = caller.fetch(("item", keys))
    return {k: float(row[0]) for k, row, found in zip(keys, got.rows[0], got.found[0], strict=True) if found}


def test_rows_that_find_no_room_are_missing_at_first_and_there_a_moment_later(
    release: Release, config: ShardConfig
) -> None:
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["tables"]["item"]["leaving_rows"] == 0)
        got = caller.fetch(("item", list(range(N_ITEMS))))
        assert int(got.found[0].sum()) == HOT_ROWS + WARM_ROWS
        for row, found, key in zip(got.rows[0], got.found[0], range(N_ITEMS), strict=True):
            assert row.tolist() == (item_row(key) if found else DEFAULT).tolist()
        for key in range(N_ITEMS):
            eventually(lambda key=key: values(caller, [key]) == {key: float(key)})
        health = tiers_of(caller)
        assert health["cold_connected"]
        item = health["tables"]["item"]
        assert (item["hot_rows"], item["warm_rows"]) == (HOT_ROWS, WARM_ROWS)
        assert item["misses"] >= N_ITEMS - HOT_ROWS - WARM_ROWS


def test_a_key_that_is_nowhere_is_not_asked_for_again_until_it_is_written(
    release: Release, config: ShardConfig, broker: EmbeddedBroker, topics: Topics
) -> None:
    assert config.tiers is not None
    config = replace(config, tiers=replace(config.tiers, rules=TierRules(negative_ttl_s=3600.0)))
    with running(config, release) as address, asking(release, address) as caller:
        assert values(caller, [7777]) == {}
        eventually(lambda: tiers_of(caller)["tables"]["item"]["cold"]["absent"] == 1)
        assert values(caller, [7777]) == {}
        assert tiers_of(caller)["tables"]["item"]["asked_rows"] == 0
        with publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, [7777], 5.0)
        eventually(lambda: values(caller, [7777]) == {7777: 5.0})


def test_a_deleted_row_stays_deleted_and_an_add_finds_its_row_however_cold(
    release: Release, config: ShardConfig, broker: EmbeddedBroker, topics: Topics
) -> None:
    keys = list(range(N_ITEMS))
    with running(config, release) as address, asking(release, address) as caller:
        with publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, keys, 1000.0, op=Op.ADD)
            publish(publisher, release, keys[::2], 0.0, op=Op.DELETE)
        wanted = {key: 1000.0 + key for key in keys[1::2]}
        for key in keys:
            expected = {key: wanted[key]} if key in wanted else {}
            eventually(lambda key=key, expected=expected: values(caller, [key]) == expected)
        assert all(values(caller, [key]) == {} for key in keys[::2])
        eventually(lambda: tiers_of(caller)["tables"]["item"]["waiting_writes"] == 0)


class Ledger:
    """What the rows must be, by a rule of its own."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rows: dict[int, float] = {key: float(key) for key in range(N_ITEMS)}

    def publish(self, publisher: Publisher, release: Release) -> None:
        op = self.chance.choice([Op.ASSIGN, Op.ADD, Op.ADD, Op.DELETE])
        keys = self.chance.sample(range(N_KEYS), 4)
        value = float(self.chance.randint(1, 9))
        for key in keys:
            if op is Op.DELETE:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value + (self.rows.get(key, 0.0) if op is Op.ADD else 0.0)
        publish(publisher, release, keys, value, op=op)

    def check(self, caller: Caller) -> None:
        eventually(lambda: sum(caller.health()["lag"].values()) == 0 and caller.health()["log_connected"], timeout_s=30)
        for key in range(N_KEYS):
            expected = {key: self.rows[key]} if key in self.rows else {}
            eventually(lambda key=key, expected=expected: values(caller, [key]) == expected, timeout_s=20)
        # The last update was seen; what is read again from wherever it lies must be the same.
        for key in range(N_KEYS):
            if key in self.rows:
                assert eventually(lambda key=key: values(caller, [key])) == {key: self.rows[key]}
            else:
                assert values(caller, [key]) == {}
                eventually(lambda: tiers_of(caller)["tables"]["item"]["asked_rows"] == 0)
                assert values(caller, [key]) == {}
        assert tiers_of(caller)["tables"]["item"]["waiting_writes"] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_every_update_counts_once_through_kills_of_a_shard_whose_rows_are_mostly_cold(
    release: Release, config: ShardConfig, broker: EmbeddedBroker, topics: Topics, seed: int
) -> None:
    config, ledger = often(config), Ledger(seed)
    with publishing(broker.bootstrap, topics) as publisher:
        for _ in range(4):
            process = ShardProcess(config, release)
            try:
                with asking(release, process.address) as caller:
                    for _ in range(ledger.chance.randint(20, 80)):
                        ledger.publish(publisher, release)
                        values(caller, ledger.chance.sample(range(N_KEYS), 5))
            finally:
                process.kill()
        with running(config, release) as address, asking(release, address) as caller:
            ledger.check(caller)
            assert caller.health()["snapshot"]["restored_from"] != "release"


def test_nothing_is_lost_while_redis_is_killed_and_comes_back(
    release: Release, config: ShardConfig, broker: EmbeddedBroker, topics: Topics, redis: EmbeddedRedis
) -> None:
    ledger = Ledger(3)
    with running(often(config), release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["tables"]["item"]["leaving_rows"] == 0)
        with publishing(broker.bootstrap, topics) as publisher:
            for _ in range(3):
                assert redis.pid is not None
                os.kill(redis.pid, signal.SIGKILL)
                for _ in range(30):
                    ledger.publish(publisher, release)
                    got = caller.fetch(("item", ledger.chance.sample(range(N_KEYS), 5)), timeout_s=0.5)
                    assert got.missing_shards == ()
                eventually(lambda: not tiers_of(caller)["cold_connected"])
                redis.restart()
                for _ in range(10):
                    ledger.publish(publisher, release)
            ledger.check(caller)
        assert tiers_of(caller)["cold_losses"] == 0


def test_redis_that_lost_its_rows_is_noticed_and_what_is_held_is_written_again(
    release: Release, config: ShardConfig, redis: EmbeddedRedis
) -> None:
    assert config.tiers is not None
    # Looking at all rows once must not bring any up.
    config = replace(config, tiers=replace(config.tiers, rules=TierRules(admission_threshold=10, negative_ttl_s=0.05)))
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["tables"]["item"]["leaving_rows"] == 0)
        held = list(values(caller, list(range(N_ITEMS))))
        redis.stop()
        for file in redis.directory.glob("append*"):
            file.unlink()
        redis.restart()
        lost = next(key for key in range(N_ITEMS) if key not in held)
        eventually(lambda: [values(caller, [lost])] and tiers_of(caller)["cold_losses"] == 1)
        assert not caller.health()["complete"]
        assert len(values(caller, held)) == len(held)


def test_a_new_shard_has_the_rows_that_were_asked_for_most_ready_and_says_so(
    release: Release, config: ShardConfig, tmp_path: Path
) -> None:
    favourites = [41, 43, 45, 47, 49]
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["warm"])
        for _ in range(30):
            caller.fetch(("item", favourites))
            eventually(lambda: set(values(caller, favourites)) == set(favourites))
        written = tiers_of(caller)["tables"]["item"]
        assert written["hits"]["hot"] > 30
        before = tiers_of(caller)["lists_written"]
        eventually(lambda: tiers_of(caller)["lists_written"] > before + 4)
    fresh = replace(config, snapshot_root=tmp_path / "elsewhere")
    with running(fresh, release) as address, asking(release, address) as caller:
        eventually(lambda: tiers_of(caller)["warm"])
        assert tiers_of(caller)["tables"]["item"]["warm_up"]["rows"] == 5
        assert set(values(caller, favourites)) == set(favourites)
        assert tiers_of(caller)["tables"]["item"]["hits"]["hot"] == 5


def test_without_a_cold_tier_a_release_that_does_not_fit_is_refused(release: Release, config: ShardConfig) -> None:
    assert config.tiers is not None
    config = replace(config, tiers=replace(config.tiers, redis_url=None))
    with pytest.raises(ReleaseRefused, match="more rows"), running(config, release):
        pass


def test_a_budget_that_holds_every_table_leaves_them_plain(release: Release, config: ShardConfig) -> None:
    config = replace(config, tiers=Tiering(hot_bytes=1 << 24))
    with running(config, release) as address, asking(release, address) as caller:
        assert tiers_of(caller)["tables"] == {}
        np.testing.assert_array_equal(caller.fetch(("item", [3])).rows[0][0], item_row(3))
