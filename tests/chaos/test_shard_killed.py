"""kill -9 of a shard and of the broker at random moments under a mixed stream: nothing acknowledged is lost or doubled.

TEST_SHARD_KILLS (20) and TEST_BROKER_KILLS (5) say how often, TEST_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.errors import TrirankError
from infra.release import Release
from param_server.config import ShardConfig
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


def check(scene: Scene, shard: ShardProcess) -> None:
    """The tables hold what the ledger says, to the bit, once the shard has read what was acknowledged."""
    with quiet(scene.writers), asking(scene.release, shard.address) as caller:
        scene.ledger.read()
        eventually(lambda: at_the_end(scene, caller), timeout_s=60)
        keys = scene.ledger.ever()
        got = caller.fetch(("item", keys))
        found = dict(zip(keys, got.found[0].tolist(), strict=True))
        rows = {key: tuple(row) for key, row in zip(keys, got.rows[0].tolist(), strict=True) if found[key]}
        assert rows == scene.ledger.rows()
        health = caller.health()
        assert health["complete"]
        assert (health["tables"]["item"]["rows"], health["counters"]["dead_letters"]) == (len(rows), 0)


def at_the_end(scene: Scene, caller: Caller) -> bool:
    """Whether the shard stands where the log ends."""
    try:
        return {int(p): at for p, at in caller.health()["positions"].items()} == scene.ledger.ends
    except TrirankError:
        return False


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
                eventually(lambda: all(writes(w) for w in it.writers), timeout_s=60)
                check(it, shard)
        finally:
            shard.kill()


def writes(writer: Writer) -> bool:
    """Whether an acknowledgement comes within a moment."""
    before = writer.published
    return eventually(lambda: writer.published > before, timeout_s=60)
