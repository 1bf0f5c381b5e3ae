"""Gateways follow the gray release in a real Redis, and say so when the last reply of an older split is out."""

from __future__ import annotations

import asyncio

import pytest

from infra.errors import RedisUnavailable
from infra.redis import connect
from infra.tasks import ended
from reranker.gray.state import change
from reranker.gray.store import Ack, GrayStore
from tests.integration.gray_redis import assigned_to, control, follower, lasting_arms, started, until, with_store


def test_a_gateway_follows_a_change_at_once_and_says_so(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, other = lasting_arms(), GrayStore(url, "t", "a")
        following = asyncio.create_task(follower(other, arms).run())
        try:
            await until(lambda: arms.split.version == 0 and other._pubsub is not None)
            await started(store)
            await until(lambda: arms.split.candidate == "b")
            while (await store.acks()).get("gw", Ack(0, "", 0, 0, ())).version < 2:
                await asyncio.sleep(0.005)
        finally:
            await ended(following)
            await other.close()

    with_store(url, body)


def test_a_change_is_acknowledged_after_the_last_reply_of_the_older_split(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms = lasting_arms()
        current = await started(store)
        await follower(store, arms).look()
        user = next(f"u{i}" for i in range(1000) if assigned_to(arms, f"u{i}") == "candidate")
        assigned = arms.assign(user_id=user, session_id=None, request_id="")
        assert current.release is not None
        with arms.flying(assigned):
            aborted = change(current.release, "abort", at_us=9, why="no")
            await store.commit(current, aborted, "abort", who="ann", why="no", at_us=9)
            looking = asyncio.create_task(follower(store, arms).look())
            await until(lambda: arms.split.version == 3)
            assert (await store.acks())["gw"].version == 2
        await looking

        assert (await store.acks())["gw"].version == 3
        assert assigned_to(arms, user) == "stable"

    with_store(url, body)


def test_a_redis_that_lost_its_last_change_brings_nothing_back(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = lasting_arms(), control(store, "gw")
        running = await started(store)
        following = follower(store, arms)
        assert running.release is not None
        with connect(url) as redis:
            before = redis.hgetall("t:gray")
            aborted = change(running.release, "abort", at_us=9, why="no")
            await store.commit(running, aborted, "abort", who="ann", why="no", at_us=9)
            await following.look()
            redis.delete("t:gray")
            redis.hset("t:gray", mapping=before)
        await following.look()

        assert arms.split.candidate is None
        found = await operator.acknowledged(await store.current())
        assert (found.acked, found.missing) == (0, ("gw",))

    with_store(url, body)


def test_a_split_with_a_release_that_is_not_loaded_is_not_followed(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms = lasting_arms()
        await started(store)
        await follower(store, arms, loaded=("a",)).look()

        assert arms.split.version == 0
        assert (await store.acks())["gw"].version == 0

    with_store(url, body)


def test_while_redis_is_away_the_split_stands_still(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms = lasting_arms()
        await started(store)
        await follower(store, arms).look()
        nowhere = GrayStore("redis://127.0.0.1:1", "t", "a")
        with pytest.raises(RedisUnavailable):
            await follower(nowhere, arms).look()
        await nowhere.close()

        assert arms.split.weight_ppm == 100_000

    with_store(url, body)
