"""What operators do to a gray release in a real Redis: who is waited for, and what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from infra.errors import RedisUnavailable
from infra.redis import connect
from reranker.gray.arms import LEASE_S, Arms
from reranker.gray.audit import verify_chain
from reranker.gray.control import Control, NotReady, UnknownRelease, VersionConflict
from reranker.gray.plan import Plan
from reranker.gray.split import SplitPlan
from reranker.gray.state import TransitionRefused, change
from reranker.gray.store import Ack, GrayStore, Trouble
from tests.integration.gray_redis import CLOCK, PLAN, control, follower, lasting_arms, sound, started, with_store


def test_an_operator_starts_pauses_and_aborts(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = lasting_arms(), control(store, "gw")
        await operator.create(PLAN, who="ann", verify=sound)
        with pytest.raises(NotReady, match="gateway gw"):
            await operator.act("g", "start", who="ann", why="", if_match=None)
        await follower(store, arms).look()
        await operator.act("g", "start", who="ann", why="", if_match=1)
        with pytest.raises(VersionConflict, match="at version 2"):
            await operator.act("g", "pause", who="ann", why="", if_match=1)
        with pytest.raises(TransitionRefused, match="healthy"):
            await operator.act("g", "promote", who="ann", why="", if_match=2)
        await operator.act("g", "weight", who="ann", why="", if_match=2, weight_ppm=200_000)
        aborted = await operator.act("g", "abort", who="ann", why="enough", if_match=None)
        waiting = asyncio.create_task(operator.acknowledged(aborted))
        await follower(store, arms).look()
        found = await waiting

        assert (found.acked, found.gateways, found.missing, found.inflight) == (1, 1, (), 0)
        assert found.generation == aborted.version == arms.split.version

    with_store(url, body)


def test_one_gray_release_at_a_time_and_only_on_top_of_what_serves(url: str) -> None:
    async def body(store: GrayStore) -> None:
        operator = control(store)
        with pytest.raises(UnknownRelease):
            await operator.get("g")
        with pytest.raises(TransitionRefused, match="stable is a, not x"):
            await operator.create(Plan(name="g", stable="x", candidate="b", path="/b"), who="ann", verify=sound)
        await operator.create(PLAN, who="ann", verify=sound)
        with pytest.raises(TransitionRefused, match="g is draft"):
            await operator.create(PLAN, who="ann", verify=sound)

    with_store(url, body)


def test_a_stack_started_with_another_release_knows_nothing_of_the_old_gray_release(url: str) -> None:
    async def body(store: GrayStore) -> None:
        made = await started(store)
        other = GrayStore(url, "t", "x")
        found = await other.current()
        assert (found.release, found.split, found.head) == (None, None, made.head)
        arms = Arms("x")
        await follower(other, arms, loaded=("x",)).look()
        assert arms.split == SplitPlan("x")

        plan = Plan(name="h", stable="x", candidate="b", path="/b")
        await Control(other, "x", 1, list, CLOCK).create(plan, who="ann", verify=sound)
        verify_chain(await other.audit(), (await other.current()).head)
        await other.close()

    with_store(url, body)


def test_a_release_that_cannot_be_served_is_said_to_be_one(url: str) -> None:
    async def body(store: GrayStore) -> None:
        operator = control(store)
        draft = await operator.create(PLAN, who="ann", verify=sound)
        assert draft.release is not None
        with connect(url) as redis:
            trouble = Trouble(draft.release.changed_us, "scores differ from the recorded ones")
            redis.hset("t:gray", "trouble", msgspec.json.encode(trouble))

        with pytest.raises(TransitionRefused, match="b cannot be served: scores differ"):
            await operator.act("g", "start", who="ann", why="", if_match=None)
        await operator.act("g", "abort", who="ann", why="", if_match=None)
        await operator.create(PLAN, who="ann", verify=sound)
        await operator.act("g", "start", who="ann", why="", if_match=None)

    with_store(url, body)


def test_a_start_waits_for_every_tier(url: str) -> None:
    async def body(store: GrayStore) -> None:
        operator = control(store, ready=False)
        await operator.create(PLAN, who="ann", verify=sound)
        with pytest.raises(NotReady, match="shard 0, edge, rerank"):
            await operator.act("g", "start", who="ann", why="", if_match=None)

    with_store(url, body)


def test_an_acknowledgement_waits_through_a_moment_without_redis(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = lasting_arms(), control(store, "gw")
        current = await started(store)
        await follower(store, arms).look()
        found, tries = store.acks, [0]

        async def acks() -> dict[str, Ack]:
            tries[0] += 1
            if tries[0] == 1:
                raise RedisUnavailable("just now")
            return await found()

        store.acks = acks  # type: ignore[method-assign]
        assert (await operator.acknowledged(current)).acked == 1

    with_store(url, body)


def test_a_gateway_that_left_the_directory_a_moment_ago_is_waited_for_and_one_that_said_goodbye_is_not(
    url: str,
) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = lasting_arms(), control(store)
        await started(store)
        await follower(store, arms, "stopped").look()
        current = await store.current()
        assert current.release is not None
        paused = change(current.release, "pause", at_us=9, why="")
        paused_now = await store.commit(current, paused, "pause", who="ann", why="", at_us=9)
        found = await operator.acknowledged(paused_now)
        assert (found.gateways, found.missing) == (1, ("stopped",))
        assert found.propagation_ms > LEASE_S * 1e3

        await store.leave("stopped")
        assert (await operator.acknowledged(paused_now)).gateways == 0

    with_store(url, body)
