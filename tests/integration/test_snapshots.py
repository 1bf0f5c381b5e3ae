"""Snapshots of running shards: taken on demand while lookups go on, loaded by another number of shards, full disks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from infra.embedded import EmbeddedBroker
from infra.release import Release
from param_server.contract import Op
from tests.integration.shards import (
    DIM,
    N_ITEMS,
    Caller,
    Topics,
    ask_snapshot,
    asking,
    publish,
    publishing,
    running,
    shard_config,
)
from tests.small_disk import fill_up, small_disk
from tests.support import eventually

KEYS = list(range(N_ITEMS))


def test_the_number_of_shards_can_grow_and_shrink_without_losing_a_row(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    added = 0
    with publishing(broker.bootstrap, topics) as publisher:
        for n_shards in (1, 3, 2, 4, 1):
            publish(publisher, release, KEYS, 1.0, op=Op.ADD)
            added += 1
            with ExitStack() as stack:
                configs = [shard_config(tmp_path, broker.bootstrap, topics, i, n_shards) for i in range(n_shards)]
                addresses = [stack.enter_context(running(config, release)) for config in configs]
                caller = stack.enter_context(asking(release, *addresses))
                rows = eventually(lambda c=caller, a=added: settled(c, a))
                assert rows == [[key + added] * DIM for key in KEYS]
                assert sum(caller.health(i)["tables"]["item"]["rows"] for i in range(n_shards)) == N_ITEMS
                assert sum(caller.health(i)["counters"]["applied"] for i in range(n_shards)) == N_ITEMS


def settled(caller: Caller, added: int) -> list[list[float]]:
    rows = caller.fetch(("item", KEYS)).rows[0]
    return rows.tolist() if (rows[:, 0] >= np.array(KEYS) + added).all() else []


def test_a_snapshot_can_be_asked_for_and_says_what_it_is(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    with running(shard_config(tmp_path, broker.bootstrap, topics), release) as address:
        with asking(release, address) as caller:
            first = ask_snapshot(caller)
            assert (first["kind"], first["rows"], first["error"]) == ("full", 2 * N_ITEMS, "")
            with publishing(broker.bootstrap, topics) as publisher:
                publish(publisher, release, [3, 4], 70.0)
            eventually(lambda: caller.value(3) == 70.0)
            second = ask_snapshot(caller)
            assert (second["kind"], second["rows"]) == ("delta", 2)
            assert ask_snapshot(caller, full=True)["kind"] == "full"


def test_a_full_disk_costs_a_snapshot_and_nothing_else(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with small_disk(tmp_path), running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: caller.health()["snapshot"]["kind"] == "start")
        good = ask_snapshot(caller)
        filler = tmp_path / "filler"
        fill_up(filler)
        with publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, KEYS, 70.0)
            eventually(lambda: caller.value(3) == 70.0)
        failed = ask_snapshot(caller)
        assert (failed["written"], failed["failed"], failed["newest"]) == (1, 1, good["newest"])
        assert "No space left" in str(failed["error"])
        assert caller.value(3) == 70.0
        assert not list(config.snapshot_root.rglob(".*.draft"))
        filler.unlink()
        again = ask_snapshot(caller)
        assert (again["written"], again["kind"], again["rows"], again["error"]) == (2, "delta", N_ITEMS, "")
