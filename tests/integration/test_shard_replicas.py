"""Replicas of a shard: each follows the log, a killed one costs no row, only the first writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.deadline import Deadline
from infra.embedded import EmbeddedBroker
from infra.errors import Permanent
from infra.kafka import LogConsumer
from infra.log import Record
from infra.release import Release
from param_server.config import ShardConfig
from param_server.contract import Op
from tests.integration.shards import (
    N_ITEMS,
    Caller,
    ShardProcess,
    Topics,
    ask_snapshot,
    asking,
    often,
    publish,
    publishing,
    recall,
    running,
    shard_config,
)
from tests.support import eventually

KEYS = list(range(N_ITEMS))


@pytest.fixture
def configs(broker: EmbeddedBroker, topics: Topics, tmp_path: Path) -> list[ShardConfig]:
    """Two replicas of one shard."""
    first = shard_config(tmp_path, broker.bootstrap, topics)
    return [first, replace(first, replica=1, name="shard-0-r1", bind=f"ipc://{tmp_path}/r1.sock")]


@pytest.fixture
def processes(configs: Sequence[ShardConfig], release: Release) -> Iterator[list[ShardProcess]]:
    with ExitStack() as stack:
        started = []
        for config in configs:
            process = ShardProcess(often(config), release)
            stack.callback(process.kill)
            started.append(process)
        yield started


def looked_up_until(caller: Caller, done: threading.Event) -> int:
    """Look up every row and recall, again and again: always all of them, from a shard that is there."""
    n = 0
    while not done.is_set():
        got = caller.fetch(("user", [7]), ("item", KEYS), topk=recall(5, []))
        assert got.missing_shards == ()
        assert got.found[1].all()
        assert got.topk is not None
        assert got.topk.keys.size == 5
        n += 1
    return n


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_replica_costs_no_row_and_updates_go_on(
    broker: EmbeddedBroker, release: Release, topics: Topics, processes: list[ShardProcess], killed: int
) -> None:
    addresses = [process.address for process in processes]
    with asking(release, *addresses, n_shards=1) as caller, publishing(broker.bootstrap, topics) as publisher:
        publish(publisher, release, KEYS, 1.0, op=Op.ADD)
        for index in (0, 1):
            eventually(lambda i=index: caller.health(i)["counters"]["applied"] == N_ITEMS)
        done = threading.Event()

        def kill() -> None:
            processes[killed].kill()
            publish(publisher, release, KEYS, 1.0, op=Op.ADD)
            done.set()

        killer = threading.Timer(0.2, kill)
        killer.start()
        assert looked_up_until(caller, done) > 10
        killer.join()
        # Each partition has a record of its own, so they do not all arrive at once.
        expected = [key + 2.0 for key in KEYS]
        eventually(lambda: caller.fetch(("item", KEYS)).rows[0][:, 0].tolist() == expected)


def test_requests_are_spread_over_replicas_and_each_asks_one(
    release: Release, configs: list[ShardConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(configs[0], release) as first, running(configs[1], release) as second:
        with asking(release, first, second, n_shards=1) as caller:
            asked: list[str] = []
            call = caller.wire.call

            async def noting(method: str, **arguments: object) -> object:
                asked.append(str(arguments["peer"]))
                return await call(method, **arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(caller.wire, "call", noting)
            for _ in range(60):
                caller.fetch(("item", [1]))
            assert min(asked.count("shard-0"), asked.count("shard-1")) > 10


def test_one_request_asks_the_same_replica_for_rows_and_recall(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two shards rows and recall are two calls to each."""
    with ExitStack() as stack:
        addresses = []
        for replica in (0, 1):
            for index in (0, 1):
                config = shard_config(tmp_path, broker.bootstrap, topics, index, 2)
                bind = f"ipc://{tmp_path}/{index}-{replica}.sock"
                config = replace(config, replica=replica, name=f"s{index}-{replica}", bind=bind)
                addresses.append(stack.enter_context(running(config, release)))
        caller = stack.enter_context(asking(release, *addresses, n_shards=2))
        asked: list[str] = []
        call = caller.wire.call

        async def noting(method: str, **arguments: object) -> object:
            asked.append(str(arguments["peer"]))
            return await call(method, **arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(caller.wire, "call", noting)
        seen = set()
        for _ in range(20):
            asked.clear()
            got = caller.fetch(("user", [7]), ("item", KEYS), topk=recall(5, []))
            assert (got.missing_shards, len(asked)) == ((), 4)
            assert len(set(asked)) == 2
            seen.add(frozenset(asked))
        assert len(seen) > 1


def test_only_the_first_replica_writes_snapshots_and_dead_letters(
    broker: EmbeddedBroker, release: Release, topics: Topics, configs: list[ShardConfig]
) -> None:
    with running(configs[0], release) as first, running(configs[1], release) as second:
        with asking(release, first, second, n_shards=1) as caller, publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, [3], 70.0)
            publish(publisher, release, [3], 1.0, generation=12345)
            for index in (0, 1):
                eventually(lambda i=index: caller.health(i)["counters"]["dead_letters"] == 1)
            assert ask_snapshot(caller)["written"] == 1
            with pytest.raises(Permanent, match="no method 'snapshot'"):
                caller.run(caller.wire.call("snapshot", deadline=Deadline.after(10), peer="shard-1"))
            assert caller.health(1)["snapshot"]["written"] == 0
            assert [caller.health(i)["replica"] for i in (0, 1)] == [0, 1]
    assert len(letters(broker.bootstrap, topics)) == 1
    # A replica begins with what the first one wrote.
    with running(configs[1], release) as address, asking(release, address) as caller:
        assert caller.value(3) == 70.0
        assert caller.health()["snapshot"]["restored_from"].startswith("of-1/shard-0/snap-")


def letters(bootstrap: str, topics: Topics) -> list[Record]:
    """Every dead letter there is, once there is one."""
    consumer = LogConsumer(bootstrap, topics.deadletter, [0], positions={})
    consumer.start()
    found: list[Record] = []
    try:
        eventually(lambda: found.extend(consumer.poll(0.2)) or found)
        eventually(lambda: consumer.highwater().get(0) == found[-1].offset + 1)
    finally:
        consumer.close()
    return found


def test_a_snapshot_that_goes_while_a_replica_reads_it_is_not_the_end_of_it(
    release: Release, configs: list[ShardConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from param_server import restore as restoring
    from param_server.snapshot import SnapshotRefused

    with running(configs[0], release) as address, asking(release, address) as caller:
        # Else the first contact with the log comes after the snapshot, and a delta with it.
        eventually(lambda: caller.health()["snapshot"]["kind"] == "start")
        ask_snapshot(caller)
    reads = 0
    read_tables = restoring.read_tables

    def gone_at_first(stored: object) -> object:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise SnapshotRefused("it is damaged: it has gone")
        return read_tables(stored)  # type: ignore[arg-type]

    monkeypatch.setattr(restoring, "read_tables", gone_at_first)
    with running(configs[1], release) as address, asking(release, address) as caller:
        np.testing.assert_array_equal(caller.fetch(("item", KEYS)).rows[0][:, 0], KEYS)
    assert reads == 2
