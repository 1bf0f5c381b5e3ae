"""kill -9 of replicas that share a cold tier, at random moments under a mixed stream: nothing is lost or doubled.

TEST_REPLICA_KILLS (3) says how often, TEST_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from infra.embedded import EmbeddedRedis
from param_server.holding import TierRules
from param_server.table.evicting import bytes_for
from param_server.tiering import Tiering
from tests.chaos.test_shard_killed import Scene, check_tiers, scene
from tests.integration.shards import DIM, ShardProcess
from tests.support import ready

pytestmark = [pytest.mark.timeout(1800)]


def replica(scene: Scene, tiers: Tiering, number: int) -> ShardProcess:
    """A new process for one of the replicas."""
    config = replace(scene.config, tiers=tiers, replica=number, name=f"shard-0-r{number}")
    config = replace(config, bind=config.bind.replace("0.sock", f"r{number}.sock"))
    return ShardProcess(config, scene.release, wait=False)


def wait(shards: Sequence[ShardProcess]) -> None:
    """Until all of them serve."""
    for shard in shards:
        if not shard.address:
            shard.wait()


def test_replicas_over_one_cold_tier_killed_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    never = threading.Event()
    with ready(EmbeddedRedis(tmp_path / "redis")) as redis, scene("embedded", tmp_path) as it:
        # Room for 12 of the 140 keys.
        tiers = Tiering(2 * bytes_for(8, DIM), 2 * bytes_for(4, DIM), redis.url, rules=TierRules(negative_ttl_s=0.05))
        both = [replica(it, tiers, 0), replica(it, tiers, 1)]
        try:
            for _ in range(int(os.environ.get("TEST_REPLICA_KILLS", 3))):
                wait(both)
                never.wait(it.random.uniform(0.1, 1.0))
                killed = it.random.choice([[0], [1], [0, 1]])
                for number in killed:
                    both[number].kill()
                # The writers, and the one that is left, go on meanwhile.
                never.wait(it.random.uniform(0.0, 1.0))
                for number in killed:
                    both[number] = replica(it, tiers, number)
                wait(both)
                for shard in both:
                    check_tiers(it, shard)
        finally:
            for shard in both:
                shard.kill()
