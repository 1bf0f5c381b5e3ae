"""A whole shard whose tables lie on a GPU, or in Triton's interpreter where there is none: stream, snapshots, tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.release import Release
from param_server.config import ShardConfig
from param_server.contract import Op
from param_server.table.device import TableDevice, open_device
from param_server.tiering import Tiering
from tests.integration.shards import (
    DIM,
    N_ITEMS,
    Topics,
    ask_snapshot,
    asking,
    publish,
    publishing,
    recall,
    running,
    shard_config,
)
from tests.support import eventually
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton

pytestmark = NUMPY_MAY_OVERFLOW
KEYS = list(range(N_ITEMS))


@pytest.fixture(scope="module")
def gpu() -> TableDevice:
    need_triton()
    return open_device("cuda", given=False)


@pytest.fixture(params=["whole", "tiers"])
def config(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, topics: Topics, tmp_path: Path
) -> Iterator[ShardConfig]:
    plain = shard_config(tmp_path, broker.bootstrap, topics)
    if request.param == "whole":
        yield plain
        return
    redis = EmbeddedRedis(tmp_path / "redis")
    redis.start()
    try:
        redis.wait_ready()
        # Less than any table takes: both have tiers, of the smallest size there is.
        yield replace(plain, tiers=Tiering(hot_bytes=1, redis_url=redis.url))
    finally:
        redis.stop()


def test_a_shard_on_a_gpu_follows_the_stream_through_snapshots_and_restarts(
    broker: EmbeddedBroker, release: Release, topics: Topics, config: ShardConfig, gpu: TableDevice
) -> None:
    with publishing(broker.bootstrap, topics) as publisher:
        with running(config, release, gpu) as address, asking(release, address) as caller:
            assert caller.health()["device"] == gpu.name != "cpu"
            got = caller.fetch(("user", [7]), ("item", [1, 2, 2, -5, 49]), topk=recall(3, [49]), timeout_s=60.0)
            assert got.rows[1][:, 0].tolist() == [1.0, 2.0, 2.0, 9.0, 49.0]
            assert got.found[1].tolist() == [True, True, True, False, True]
            assert got.topk is not None
            assert got.topk.keys.tolist() == [48, 47, 46]
            first = ask_snapshot(caller)
            assert (first["kind"], first["rows"]) == ("full", 2 * N_ITEMS)
            publish(publisher, release, [3, 4, 1000], 70.0)
            publish(publisher, release, [4], 0.5, op=Op.ADD)
            publish(publisher, release, [3], 0.0, op=Op.DELETE)
            eventually(lambda: caller.health()["counters"]["applied"] == 5, timeout_s=60)
            second = ask_snapshot(caller)
            assert second["kind"] == ("delta" if config.tiers is None else "full")
            publish(publisher, release, [5], 71.0)
            eventually(lambda: caller.value(5) == 71.0, timeout_s=60)
            expected = caller.fetch(("item", [*KEYS, 1000]))
        assert (expected.rows[0][4, 0], expected.rows[0][50, 0], expected.found[0][3]) == (70.5, 70.0, False)
        # The last snapshot of a stop, and one record after it.
        publish(publisher, release, [6], 72.0)
        with running(config, release, gpu) as address, asking(release, address) as caller:
            eventually(lambda: caller.value(6) == 72.0, timeout_s=60)
            assert caller.health()["counters"]["records"] == 1
            again = caller.fetch(("item", [*KEYS, 1000]))
    rows = expected.rows[0].copy()
    rows[6] = 72.0
    np.testing.assert_array_equal(again.rows[0], rows)
    assert again.found[0].tolist() == expected.found[0].tolist()
    assert rows.shape == (N_ITEMS + 1, DIM)


def test_what_a_gpu_wrote_is_read_in_host_memory(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path, gpu: TableDevice
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with publishing(broker.bootstrap, topics) as publisher:
        with running(config, release, gpu) as address, asking(release, address) as caller:
            publish(publisher, release, [3, 77], 5.0)
            eventually(lambda: caller.value(77) == 5.0, timeout_s=60)
    with running(config, release) as address, asking(release, address) as caller:
        assert (caller.value(77), caller.value(3), caller.value(4)) == (5.0, 5.0, 4.0)
        assert caller.health()["device"] == "cpu"
        assert caller.health()["snapshot"]["restored_from"] != "release"
