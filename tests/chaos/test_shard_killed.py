"""kill -9 of shard, broker and Redis at random moments under a mixed stream: nothing acknowledged is lost or doubled.

TEST_SHARD_KILLS (20), TEST_BROKER_KILLS (5), TEST_REDIS_KILLS (5) and TEST_MOVES (4) say how often, TEST_CHAOS_SEED
repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from infra.embedded import EmbeddedRedis
from infra.errors import TrirankError
from infra.release import Release
from param_server.config import ShardConfig
from param_server.holding import TierRules
from param_server.table.evicting import bytes_for
from param_server.tiering import Tiering
from tests.brokers import Broker, make_broker
from tests.chaos.ledger import Ledger
from tests.chaos.writers import Writer, quiet, writing
from tests.integration.shards import (
    DIM,
    ITEM,
    N_ITEMS,
    N_PARTITIONS,
    Caller,
    ShardProcess,
    asking,
    item_row,
    make_release,
    make_topics,
    often,
    shard_config,
)
from tests.support import eventually

pytestmark = [pytest.mark.timeout(1800)]
N_WRITERS = 3
KEYS = [*range(100), -(2**63), 2**63 - 1]
VERSIONED = list(range(100, 140))


@dataclass
class Scene:
    """A broker, a release, writers and the ledger of what they wrote."""

    broker: Broker
    release: Release
    config: ShardConfig
    ledger: Ledger
    writers: Sequence[Writer]
    random: random.Random


@contextmanager
def scene(kind: str, folder: Path) -> Iterator[Scene]:
    """Everything but the shard, the writers writing."""
    seed = int(os.environ.get("TEST_CHAOS_SEED", 0)) or random.randrange(1, 2**31)
    print(f"TEST_CHAOS_SEED={seed}")
    broker = make_broker(kind, folder / "broker")
    try:
        release = make_release(folder / "release")
        topics = make_topics(broker.bootstrap)
        first = {key: tuple(item_row(key).tolist()) for key in range(N_ITEMS)}
        ledger = Ledger(broker.bootstrap, topics.embeddings, N_PARTITIONS, first)
        generation = release.manifest.generation
        writers = [Writer(ledger, ITEM, generation, DIM, KEYS, VERSIONED, seed + i) for i in range(N_WRITERS)]
        config = often(shard_config(folder, broker.bootstrap, topics))
        with writing(writers):
            yield Scene(broker, release, config, ledger, writers, random.Random(seed))
    finally:
        broker.stop()


def check(scene: Scene, *shards: ShardProcess) -> None:
    """The tables hold what the ledger says, to the bit, once the shards have read what was acknowledged."""
    with quiet(scene.writers), asking(scene.release, *(shard.address for shard in shards)) as caller:
        scene.ledger.read()
        eventually(lambda: at_the_end(scene, caller, len(shards)), timeout_s=180)
        rows = rows_of(caller, scene.ledger.ever())
        assert rows == scene.ledger.rows()
        healths = [caller.health(i) for i in range(len(shards))]
        assert all(health["complete"] for health in healths)
        assert sum(health["tables"]["item"]["rows"] for health in healths) == len(rows)
        assert sum(health["counters"]["dead_letters"] for health in healths) == 0


def rows_of(caller: Caller, keys: list[int]) -> dict[int, tuple[float, ...]]:
    """The rows of keys that are found."""
    got = caller.fetch(("item", keys))
    found = zip(keys, got.rows[0].tolist(), got.found[0].tolist(), strict=True)
    return {key: tuple(row) for key, row, there in found if there}


def check_tiers(scene: Scene, shard: ShardProcess) -> None:
    """The same where most rows are in Redis: each is asked for until it has come up, or is known to be nowhere."""
    with quiet(scene.writers), asking(scene.release, shard.address) as caller:
        scene.ledger.read()
        eventually(lambda: at_the_end(scene, caller, 1), timeout_s=180)
        expected = scene.ledger.rows()
        for key in scene.ledger.ever():
            if key in expected:
                assert eventually(lambda key=key: rows_of(caller, [key]), timeout_s=30) == {key: expected[key]}
            else:
                eventually(lambda key=key: settled(caller, key), timeout_s=30)
                assert rows_of(caller, [key]) == {}
        health = caller.health()
        assert health["complete"]
        assert (health["tiers"]["cold_losses"], health["counters"]["dead_letters"]) == (0, 0)


def settled(caller: Caller, key: int) -> bool:
    """Whether the row was found, or nothing is on its way to be found."""
    return bool(rows_of(caller, [key])) or not caller.health()["tiers"]["tables"]["item"]["asked_rows"]


def at_the_end(scene: Scene, caller: Caller, n_shards: int) -> bool:
    """Whether the shards stand where the log ends; says where they stand instead."""
    try:
        healths = [caller.health(i) for i in range(n_shards)]
    except TrirankError as error:
        print(f"no health: {error}")
        return False
    positions = {int(p): at for health in healths for p, at in health["positions"].items()}
    if positions != scene.ledger.ends:
        print(f"at {positions} of {scene.ledger.ends}")
        if any(at > scene.ledger.ends[p] for p, at in positions.items()):
            # A record that failed for its writer reached the log all the same, after the ledger was read.
            scene.ledger.read()
    return positions == scene.ledger.ends


@pytest.mark.parametrize("kind", ["apache", "embedded"])
def test_a_shard_killed_at_random_moments_loses_and_doubles_nothing(kind: str, tmp_path: Path) -> None:
    kills = int(os.environ.get("TEST_SHARD_KILLS", 20))
    never = threading.Event()
    with scene(kind, tmp_path) as it:
        for killed in range(kills):
            shard = ShardProcess(it.config, it.release, wait=False)
            try:
                if it.random.random() < 0.25:
                    # Somewhere in its start: loading, replaying, or before any of it.
                    never.wait(it.random.uniform(0.0, 4.0))
                else:
                    shard.wait()
                    check(it, shard)
                    never.wait(it.random.expovariate(4.0))
            finally:
                shard.kill()
            print(f"kill {killed + 1}: {sum(w.published for w in it.writers)} acknowledged")
        shard = ShardProcess(it.config, it.release)
        try:
            check(it, shard)
        finally:
            shard.kill()
        assert all(w.published > kills for w in it.writers)


def test_an_apache_broker_killed_under_the_stream_loses_and_doubles_nothing(tmp_path: Path) -> None:
    never = threading.Event()
    with scene("apache", tmp_path) as it:
        shard = ShardProcess(it.config, it.release)
        try:
            for _ in range(int(os.environ.get("TEST_BROKER_KILLS", 5))):
                never.wait(it.random.uniform(0.1, 1.0))
                it.broker.kill()
                if it.random.random() < 0.5:
                    shard.kill()
                    it.broker.start()
                    shard = ShardProcess(it.config, it.release)
                else:
                    it.broker.start()
                assert all(writes(w) for w in it.writers)
                check(it, shard)
        finally:
            shard.kill()


def writes(writer: Writer) -> bool:
    """Whether an acknowledgement comes."""
    before = writer.published
    return eventually(lambda: writer.published > before, timeout_s=180)


def test_a_shard_and_the_redis_below_it_killed_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "redis")
    redis.start()
    never = threading.Event()
    try:
        redis.wait_ready()
        with scene("embedded", tmp_path) as it:
            # Room for 12 of the 140 keys.
            tiers = Tiering(
                2 * bytes_for(8, DIM), 2 * bytes_for(4, DIM), redis.url, rules=TierRules(negative_ttl_s=0.05)
            )
            config = replace(it.config, tiers=tiers)
            shard = ShardProcess(config, it.release)
            try:
                for _ in range(int(os.environ.get("TEST_REDIS_KILLS", 5))):
                    never.wait(it.random.uniform(0.1, 0.8))
                    assert redis.pid is not None
                    os.kill(redis.pid, signal.SIGKILL)
                    killed_too = it.random.random() < 0.5
                    if killed_too:
                        shard.kill()
                    # The writers go on meanwhile.
                    never.wait(it.random.uniform(0.0, 0.5))
                    redis.restart()
                    if killed_too:
                        shard = ShardProcess(config, it.release)
                    check_tiers(it, shard)
            finally:
                shard.kill()
    finally:
        redis.stop()


def test_partitions_that_move_under_the_stream_lose_and_double_nothing(tmp_path: Path) -> None:
    """The number of shards changes again and again; those before are killed, not asked to stop."""
    never = threading.Event()
    with scene("embedded", tmp_path) as it:
        for _ in range(int(os.environ.get("TEST_MOVES", 4))):
            n_shards = it.random.randint(1, N_PARTITIONS)
            with ExitStack() as stack:
                shards = []
                for index in range(n_shards):
                    name, bind = f"shard-{index}", f"ipc://{tmp_path}/{n_shards}-{index}.sock"
                    config = replace(it.config, index=index, n_shards=n_shards, name=name, bind=bind)
                    shards.append(ShardProcess(config, it.release))
                    stack.callback(shards[-1].kill)
                check(it, *shards)
                never.wait(it.random.uniform(0.0, 1.0))
