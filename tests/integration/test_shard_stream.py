"""A shard against a real broker and over the real wire: updates become visible, once, through every restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from infra.embedded import EmbeddedBroker
from infra.kafka import LogConsumer, LogProducer
from infra.log import Record
from infra.release import Release
from param_server.client import FetchResult
from param_server.contract import Op
from param_server.publish import Publisher
from param_server.routing import partition_of
from tests.integration.shards import (
    DEFAULT,
    DIM,
    N_ITEMS,
    N_PARTITIONS,
    ShardProcess,
    Topics,
    asking,
    item_row,
    make_release,
    often,
    publish,
    publishing,
    running,
    shard_config,
)
from tests.support import eventually


def test_a_published_row_becomes_visible(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with running(config, release) as address, asking(release, address) as caller:
        assert caller.value(3) == 3.0
        before = caller.fetch(("item", [3, 12345]))
        assert before.found[0].tolist() == [True, False]
        assert before.rows[0].tolist() == [item_row(3).tolist(), DEFAULT.tolist()]
        assert before.watermark_us == release.manifest.created_us
        with publishing(broker.bootstrap, topics) as publisher:
            publish(publisher, release, [3, 12345], 70.0)
            eventually(lambda: caller.value(3) == caller.value(12345) == 70.0)
            publish(publisher, release, [3], 0.5, op=Op.ADD)
            eventually(lambda: caller.value(3) == 70.5)
            publish(publisher, release, [3], 0.0, op=Op.DELETE)
            eventually(lambda: not caller.fetch(("item", [3])).found[0][0])
        assert caller.fetch(("item", [4])).watermark_us == 2_000_000
        health = caller.health()
        assert eventually(lambda: sum(caller.health()["lag"].values()) == 0)
        assert health["complete"]
        assert health["tables"]["item"]["rows"] == N_ITEMS
        assert health["tables"]["item"]["tombstones"] == 1


def test_a_generation_that_is_not_served_is_a_missing_shard(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with running(config, release) as address, asking(release, address) as caller:
        assert caller.fetch(("item", [1]), generation=12345).missing_shards == (0,)


def test_adds_count_exactly_once_through_kills_and_snapshots(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = often(shard_config(tmp_path, broker.bootstrap, topics))
    keys = list(range(N_ITEMS))
    total = 0
    with publishing(broker.bootstrap, topics) as publisher:
        for killed_after in (5, 20, 35):
            process = ShardProcess(config, release)
            try:
                for _ in range(killed_after):
                    publish(publisher, release, keys, 1.0, op=Op.ADD)
                    total += 1
                with asking(release, process.address) as caller:
                    eventually(lambda c=caller: c.health()["snapshot"]["written"])
                publish(publisher, release, keys, 1.0, op=Op.ADD)
                total += 1
            finally:
                process.kill()
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: sum(caller.health()["lag"].values()) == 0 and caller.health()["log_connected"])
        rows = eventually(lambda: settled(caller.fetch(("item", keys)), total))
    assert rows == [[key + total] * DIM for key in keys]
    assert any((tmp_path / "snapshots" / "of-1" / "shard-0").iterdir())


def settled(got: FetchResult, total: int) -> list[list[float]]:
    """The rows once the last add has been seen on all of them; more than the total would show too."""
    rows = got.rows[0]
    return rows.tolist() if (rows[:, 0] >= np.arange(N_ITEMS) + total).all() else []


def test_a_clean_stop_leaves_a_snapshot_that_the_next_start_goes_on_from(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with publishing(broker.bootstrap, topics) as publisher:
        publish(publisher, release, [3], 1.0, op=Op.ADD)
        with running(config, release) as address, asking(release, address) as caller:
            eventually(lambda: caller.value(3) == 4.0)
        publish(publisher, release, [3], 1.0, op=Op.ADD)
        with running(config, release) as address, asking(release, address) as caller:
            eventually(lambda: caller.value(3) == 5.0)
            assert caller.health()["counters"]["records"] == 1


def test_a_snapshot_of_another_release_is_not_used(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    with publishing(broker.bootstrap, topics) as publisher:
        publish(publisher, release, [3], 70.0)
    with running(config, release) as address, asking(release, address) as caller:
        eventually(lambda: caller.value(3) == 70.0)
    other = make_release(tmp_path / "r2", name="r2")
    with running(config, other) as address, asking(other, address) as caller:
        assert caller.value(3) == 3.0


def read_letters(bootstrap: str, topics: Topics, n: int) -> list[Record]:
    consumer = LogConsumer(bootstrap, topics.deadletter, [0], positions={})
    consumer.start()
    letters: list[Record] = []

    def enough() -> bool:
        letters.extend(consumer.poll(0.1))
        return len(letters) >= n

    try:
        eventually(enough)
    finally:
        consumer.close()
    return letters


def test_what_cannot_be_applied_becomes_a_dead_letter_and_the_rest_goes_on(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    producer = LogProducer(broker.bootstrap)
    producer.start()
    partition = int(partition_of(np.array([3]), N_PARTITIONS)[0])
    try:
        publisher = Publisher(producer, topics.embeddings, N_PARTITIONS)
        producer.send(topics.embeddings, partition, b"nonsense").result(10)
        publish(publisher, release, [3], 1.0, generation=12345)
        publish(publisher, release, [3], 70.0)
        with running(config, release) as address, asking(release, address) as caller:
            eventually(lambda: caller.value(3) == 70.0)
            letters = read_letters(broker.bootstrap, topics, 2)
            eventually(lambda: caller.health()["dead_letters_pending"] == 0)
            assert caller.health()["counters"]["dead_letters"] == 2
    finally:
        producer.close()
    about = [json.loads(letter.key or b"") for letter in letters]
    assert [(a["reason"], a["topic"], a["partition"], a["offset"]) for a in about] == [
        ("truncated", topics.embeddings, partition, 0),
        ("generation", topics.embeddings, partition, 1),
    ]
    assert letters[0].value == b"nonsense"


def test_a_table_without_room_sends_only_what_did_not_fit_to_the_dead_letters(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    config = shard_config(tmp_path, broker.bootstrap, topics)
    keys = list(range(1000, 1000 + 4 * N_ITEMS))
    with publishing(broker.bootstrap, topics) as publisher:
        publish(publisher, release, keys, 1.0)
        with running(config, release) as address, asking(release, address) as caller:
            eventually(lambda: caller.health()["counters"]["refused"] == N_ITEMS)
            assert caller.health()["tables"]["item"]["rows"] == 4 * N_ITEMS
            assert int(caller.fetch(("item", keys)).found[0].sum()) == 3 * N_ITEMS


def test_a_broker_that_lost_its_log_is_noticed_and_followed_again(release: Release, tmp_path: Path) -> None:
    own = EmbeddedBroker(tmp_path / "broker", topics={"t.embeddings": N_PARTITIONS, "t.deadletter": 1})
    topics = Topics("t.embeddings", "t.deadletter")
    own.start()
    try:
        own.wait_ready()
        config = shard_config(tmp_path, own.bootstrap, topics)
        with running(config, release) as address, asking(release, address) as caller:
            with publishing(own.bootstrap, topics) as publisher:
                for _ in range(3):
                    publish(publisher, release, [3], 70.0)
                eventually(lambda: caller.value(3) == 70.0)
            own.restart()
            own.wait_ready()
            with publishing(own.bootstrap, topics) as publisher:
                publish(publisher, release, [3], 71.0)
            eventually(lambda: caller.value(3) == 71.0, timeout_s=20)
            health = caller.health()
            assert (health["log_losses"], health["log_epoch"], health["complete"]) == (1, 1, False)
    finally:
        own.stop()


def test_a_shard_serves_while_the_broker_is_away(release: Release, tmp_path: Path) -> None:
    config = shard_config(tmp_path, "127.0.0.1:1", Topics("t.embeddings", "t.deadletter"))
    with running(config, release) as address, asking(release, address) as caller:
        assert caller.value(3) == 3.0
        assert not caller.health()["log_connected"]
