"""Histories, attributes and items in a real Redis: one round trip to read, exact writes, seeding, Redis away."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from feature_service.hashing import ITEM, USER, key_of
from feature_service.schema import FeatureSchema
from feature_service.store import FeatureStore, HistoryEvent, HistoryWriter, UserState, register_items
from infra.deadline import Deadline
from infra.embedded import EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.redis import connect
from infra.release import Item, User

SCHEMA = FeatureSchema(n_user_buckets=10, max_history=5)


@pytest.fixture
def writer(url: str) -> Iterator[HistoryWriter]:
    made = HistoryWriter(url, "s", SCHEMA)
    yield made
    made.close()


def read(url: str, user_key: int, within_s: float = 5.0) -> UserState:
    async def go() -> UserState:
        store = FeatureStore(url, "s", SCHEMA)
        try:
            return await store.read(user_key, Deadline.after(within_s))
        finally:
            await store.close()

    return asyncio.run(go())


def click(user_key: int, item_key: int, ts_us: int) -> HistoryEvent:
    return HistoryEvent(user_key, item_key, "click", ts_us)


def test_a_history_comes_back_oldest_first_whatever_the_order_it_was_written_in(
    url: str, writer: HistoryWriter
) -> None:
    writer.apply([click(-7, -(2**63), 30), click(-7, 2**63 - 1, 10), click(-7, 0, 20)], {0: 3}, "log")
    history = read(url, -7).history
    assert history.keys.tolist() == [2**63 - 1, 0, -(2**63)]
    assert history.ts_us.tolist() == [10, 20, 30]


def test_only_the_newest_events_are_kept(url: str, writer: HistoryWriter) -> None:
    writer.apply([click(1, i, 1000 + i) for i in range(8)], {0: 8}, "log")
    writer.apply([click(1, 99, 5)], {0: 9}, "log")
    assert read(url, 1).history.keys.tolist() == [3, 4, 5, 6, 7]
    with connect(url) as client:
        assert client.zcard("s:h:0000000000000001") == 5


def test_times_beyond_the_precision_of_milliseconds_survive(url: str, writer: HistoryWriter) -> None:
    ts = [1_796_131_463_053_123, 1_796_131_463_053_124]
    writer.apply([click(1, 5, ts[1]), click(1, 6, ts[0])], {}, "log")
    assert read(url, 1).history.ts_us.tolist() == ts
    assert read(url, 1).history.keys.tolist() == [6, 5]


def test_somebody_nobody_has_seen_has_an_empty_history_and_no_attributes(url: str) -> None:
    state = read(url, 12345)
    assert state.history.keys.size == 0
    assert state.attributes == {}


def test_reading_a_user_takes_one_round_trip(url: str, writer: HistoryWriter) -> None:
    writer.seed([User("u", {"sex": "F"}, ["a", "b"], [1, 2])])

    async def count_round_trips() -> int:
        loop_writes = 0

        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: bool) -> None:
            nonlocal loop_writes
            while chunk := await source.read(65536):
                loop_writes += count
                sink.write(chunk)
                await sink.drain()
            sink.close()

        async def accept(reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
            server_reader, server = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
            await asyncio.gather(relay(reader, server, False), relay(server_reader, client, True))
            ended.set()

        ended = asyncio.Event()
        proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        store = FeatureStore(f"redis://127.0.0.1:{port}/0", "s", SCHEMA)
        # The first read also greets the server.
        await store.read(key_of(USER, "u"), Deadline.after(5))
        before = loop_writes
        state = await store.read(key_of(USER, "u"), Deadline.after(5))
        assert state.attributes == {"sex": "F"}
        assert state.history.keys.tolist() == [key_of(ITEM, "a"), key_of(ITEM, "b")]
        after = loop_writes
        await store.close()
        await ended.wait()
        proxy.close()
        await proxy.wait_closed()
        return after - before

    assert asyncio.run(count_round_trips()) == 1


def test_positions_identity_and_counts_are_stored_with_the_events(url: str, writer: HistoryWriter) -> None:
    assert writer.positions() == ({}, None)
    writer.apply([click(1, 2, 3)], {0: 7, 3: 1}, "cluster/topic", {"click": 1, "impression": 4})
    writer.apply([], {0: 8}, "cluster/topic", {"impression": 1})
    assert writer.positions() == ({0: 8, 3: 1}, "cluster/topic")
    assert writer.counts() == {"click": 1, "impression": 5}


def test_a_record_applied_twice_is_one_event(url: str, writer: HistoryWriter) -> None:
    for _ in range(2):
        writer.apply([click(1, 2, 3)], {0: 1}, "log")
    assert read(url, 1).history.keys.tolist() == [2]


def test_events_and_positions_survive_kill_9_of_redis_together(
    redis: EmbeddedRedis, url: str, writer: HistoryWriter
) -> None:
    for i in range(50):
        writer.apply([click(i, i, 1)], {0: i + 1}, "log", {"click": 1})
    pid = redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    redis.restart()
    assert writer.positions() == ({0: 50}, "log")
    assert writer.counts() == {"click": 50}
    assert read(url, 49).history.keys.tolist() == [49]


def test_seeding_fills_absent_and_older_histories_and_leaves_newer_ones_alone(url: str, writer: HistoryWriter) -> None:
    users = [User("old", {"age": "7"}, ["a"], [10]), User("new", {}, ["a"], [10]), User("empty", {"sex": "M"}, [], [])]
    writer.apply([click(key_of(USER, "new"), 1, 11)], {}, "log")
    writer.apply([click(key_of(USER, "old"), 1, 9)], {}, "log")
    assert writer.seed(users) == 1
    assert read(url, key_of(USER, "old")).history.keys.tolist() == [1, key_of(ITEM, "a")]
    assert read(url, key_of(USER, "old")).attributes == {"age": "7"}
    assert read(url, key_of(USER, "new")).history.keys.tolist() == [1]
    assert read(url, key_of(USER, "empty")).attributes == {"sex": "M"}
    assert writer.seed(users) == 0


def test_a_thousand_users_are_seeded_whole(url: str, writer: HistoryWriter) -> None:
    schema = FeatureSchema(n_user_buckets=10)
    users = [User(str(u), {"age": "30", "sex": "M"}, [str(i) for i in range(50)], list(range(50))) for u in range(1000)]
    seeder = HistoryWriter(url, "s", schema)
    assert seeder.seed(users) == 1000
    seeder.close()
    assert all(read(url, key_of(USER, str(u))).history.keys.size == SCHEMA.max_history for u in (0, 499, 999))


def test_items_that_came_later_are_found_by_their_keys(url: str) -> None:
    new = Item("premiere", key_of(ITEM, "premiere"), "The Premiere", ["Drama"], 0)
    register_items(url, "s", [new])

    async def go() -> list[Item]:
        store = FeatureStore(url, "s", SCHEMA)
        found = await store.items([1, new.key, -1], Deadline.after(5))
        await store.close()
        return found

    assert asyncio.run(go()) == [new]


def test_redis_away_is_said_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RedisUnavailable):
        read("redis://127.0.0.1:1/0", 1)
    with pytest.raises(RedisUnavailable):
        HistoryWriter("redis://127.0.0.1:1/0", "s", SCHEMA).positions()
    assert time.monotonic() - started < 30.0


async def refused_within(store: FeatureStore, seconds: float) -> bool:
    """Whether a read with a deadline of 50 ms is refused in that time."""
    started = time.monotonic()
    with pytest.raises(RedisUnavailable):
        await store.read(1, Deadline.after(0.05))
    return time.monotonic() - started < seconds


def test_a_redis_that_does_not_answer_costs_no_more_than_the_deadline_and_the_next_answer_is_right(
    redis: EmbeddedRedis, url: str, writer: HistoryWriter
) -> None:
    writer.apply([click(1, 11, 1), click(2, 22, 1)], {}, "log")
    pid = redis.pid
    assert pid is not None

    async def go() -> None:
        store = FeatureStore(url, "s", SCHEMA)
        await store.read(1, Deadline.after(5))
        os.kill(pid, signal.SIGSTOP)
        try:
            # Less than the second after which any command is given up; one time in many on a busy machine.
            assert any([await refused_within(store, 0.9) for _ in range(10)])
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await store.read(2, Deadline.after(5))).history.keys.tolist() == [22]
        await store.close()

    asyncio.run(go())


def test_after_a_restart_of_redis_reads_go_on_with_the_same_store(redis: EmbeddedRedis, url: str) -> None:
    async def go() -> None:
        store = FeatureStore(url, "s", SCHEMA)
        await store.read(1, Deadline.after(5))
        await asyncio.to_thread(redis.restart)
        assert (await store.read(1, Deadline.after(5))).attributes == {}
        await store.close()

    asyncio.run(go())


def test_what_nobody_can_read_counts_as_redis_away(url: str) -> None:
    with connect(url) as client:
        client.set("s:a:0000000000000001", b"{not json")
        client.zadd("s:h:0000000000000002", {b"short": 1})
        client.set("s:h:0000000000000003", b"of another type")
    for user_key in (1, 2, 3):
        with pytest.raises(RedisUnavailable):
            read(url, user_key)
