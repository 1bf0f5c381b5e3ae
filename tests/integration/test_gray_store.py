"""The gray release in a real Redis: commits on top of what was read, leases that fence, gateways that follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest

from infra.clock import SystemClock
from infra.directory import Entry
from infra.embedded import EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.redis import connect
from infra.tasks import ended
from reranker.gray.arms import LEASE_S, Arms
from reranker.gray.audit import split_at, verify_chain
from reranker.gray.control import Control, NotReady, UnknownRelease, VersionConflict
from reranker.gray.controller import Controller
from reranker.gray.follower import Follower
from reranker.gray.plan import HARD_GATES, Plan, Step
from reranker.gray.split import SplitPlan
from reranker.gray.state import GrayRelease, TransitionRefused, change
from reranker.gray.store import Ack, Conflict, Current, GrayStore, Trouble
from reranker.gray.tally import Outcome, Sample

CLOCK = SystemClock()
PLAN = Plan(
    name="g", stable="a", candidate="b", path="/b", gates=HARD_GATES[:3],
    steps=(Step(weight_ppm=100_000, hold_s=0, min_samples=100), Step(weight_ppm=500_000, hold_s=0, min_samples=100)),
)  # fmt: skip
FINE = Outcome(took_ms=3, failed=False, late=False, degraded=False, candidates=9, missing_rows=0, cold=False, shown=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    redis.start()
    redis.wait_ready()
    yield redis
    redis.stop()


@pytest.fixture
def url(server: EmbeddedRedis) -> str:
    """An empty Redis."""
    with connect(server.url) as client:
        client.flushall()
    return server.url


def with_store(url: str, body: Callable[[GrayStore], Awaitable[None]]) -> None:
    """Run `body` with a store in a loop of its own."""

    async def run() -> None:
        store = GrayStore(url, "t", "a")
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(run())


async def started(store: GrayStore, plan: Plan = PLAN) -> Current:
    """A running release."""
    draft = await store.commit(await store.current(), GrayRelease(plan=plan), "create", who="ann", why="", at_us=1)
    assert draft.release is not None
    running = change(draft.release, "start", at_us=CLOCK.now_us(), why="go")
    return await store.commit(draft, running, "start", who="ann", why="go", at_us=CLOCK.now_us())


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Let the loop turn until the condition holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "not in time"
        await asyncio.sleep(0.005)


def test_what_was_committed_is_in_force_and_in_the_log(url: str) -> None:
    async def body(store: GrayStore) -> None:
        assert (await store.current()).release is None
        made = await started(store)

        found = await store.current()
        assert found == made
        assert found.split is not None
        assert (found.split.candidate, found.split.weight_ppm, found.split.epoch, found.version) == ("b", 100_000, 2, 2)
        entries = await store.audit()
        verify_chain(entries, found.head)
        assert [(entry.action, entry.who, entry.why) for entry in entries] == [
            ("create", "ann", ""),
            ("start", "ann", "go"),
        ]
        assert split_at(entries, entries[1].at_us, SplitPlan("a")) == found.split

    with_store(url, body)


def test_of_two_changes_on_the_same_version_one_is_refused(url: str) -> None:
    async def body(store: GrayStore) -> None:
        read = await started(store)
        assert read.release is not None
        paused = change(read.release, "pause", at_us=5, why="")
        results = await asyncio.gather(
            *(store.commit(read, paused, "pause", who=who, why="", at_us=5) for who in ("ann", "bob")),
            return_exceptions=True,
        )

        assert sum(isinstance(result, Conflict) for result in results) == 1
        assert (await store.current()).version == 3

    with_store(url, body)


def test_a_leader_that_lost_its_lease_changes_nothing(url: str) -> None:
    async def body(store: GrayStore) -> None:
        read = await started(store)
        assert read.release is not None
        assert await store.lead("one")
        assert not await store.lead("two")
        with connect(url) as redis:
            redis.set("t:gray:lease", "two")

        with pytest.raises(Conflict, match="lease"):
            await store.commit(
                read, change(read.release, "pause", at_us=5, why=""), "pause", who="one", why="", at_us=5, lease="one"
            )
        assert (await store.current()).version == 2

    with_store(url, body)


def test_another_takes_over_within_three_seconds_of_a_dead_leader(url: str) -> None:
    async def body(store: GrayStore) -> None:
        assert await store.lead("dead")
        began_s = time.monotonic()
        while not await store.lead("heir"):
            await asyncio.sleep(0.05)
        assert time.monotonic() - began_s < 3.0

    with_store(url, body)


def test_counts_of_all_gateways_add_up_and_units_are_counted_once(url: str) -> None:
    async def body(store: GrayStore) -> None:
        one, other = Arms("a"), Arms("a")
        split = (await started(store)).split
        assert split is not None
        for arms in (one, other):
            arms.follow(split)
            arms.renew(CLOCK.monotonic_s())
            for i in range(2000):
                assigned = arms.assign(user_id=f"u{i}", session_id=None, request_id="")
                arms.tally.answered(assigned, FINE)
        for name, arms in (("one", one), ("other", other)):
            await store.tell(split.epoch, name, arms.tally.figures(), arms.tally.new_places())

        told = await store.told(split.epoch)
        mine = one.tally.figures()
        compared = Sample("candidate", True)
        assert told[compared].requests == 2 * mine[compared].requests > 300
        assert told[compared].units == mine[compared].requests
        assert told[Sample("stable", False)].requests == 2 * mine[Sample("stable", False)].requests

    with_store(url, body)


def follower(store: GrayStore, arms: Arms, name: str = "gw", *, loaded: tuple[str, ...] = ("a", "b")) -> Follower:
    async def load(_: Current) -> tuple[str, ...]:
        return loaded

    return Follower(store, arms, name, load, CLOCK)


def test_a_gateway_follows_a_change_at_once_and_says_so(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, other = Arms("a"), GrayStore(url, "t", "a")
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
        arms = Arms("a")
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


def assigned_to(arms: Arms, user: str) -> str:
    return arms.assign(user_id=user, session_id=None, request_id="").arm


def test_a_redis_that_lost_its_last_change_brings_nothing_back(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = Arms("a"), control(store, "gw")
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
        arms = Arms("a")
        await started(store)
        await follower(store, arms, loaded=("a",)).look()

        assert arms.split.version == 0
        assert (await store.acks())["gw"].version == 0

    with_store(url, body)


def test_while_redis_is_away_the_split_stands_still(server: EmbeddedRedis, url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms = Arms("a")
        await started(store)
        await follower(store, arms).look()
        nowhere = GrayStore("redis://127.0.0.1:1", "t", "a")
        with pytest.raises(RedisUnavailable):
            await follower(nowhere, arms).look()
        await nowhere.close()

        assert arms.split.weight_ppm == 100_000

    with_store(url, body)


async def served(store: GrayStore, arms: Arms, outcome: Outcome, n: int = 4000) -> None:
    """Requests of many users, counted and told."""
    for i in range(n):
        assigned = arms.assign(user_id=f"u{i}", session_id=None, request_id="")
        arms.tally.answered(assigned, outcome if assigned.arm == "candidate" else FINE)
    await follower(store, arms).look()


def test_a_good_release_goes_up_step_by_step_and_no_step_twice(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, leaders = Arms("a"), [Controller(store, token, CLOCK) for token in ("one", "two")]
        await started(store)
        await follower(store, arms).look()
        assert await store.lead("one")
        first = await leaders[0].look()
        assert first is not None
        assert (first.act, first.verdict) == ("hold", "inconclusive")

        await served(store, arms, FINE)
        looked = await asyncio.gather(*(leader.look() for leader in leaders), return_exceptions=True)

        assert sum(not isinstance(one, BaseException) and one is not None and one.act == "step" for one in looked) == 1
        current = await store.current()
        assert current.release is not None
        assert (current.release.step, current.release.weight_ppm, current.version) == (1, 500_000, 3)
        again = await leaders[0].look()
        assert again is not None
        assert again.act == "hold"
        assert again.sentence.startswith("0 of 100 requests")

    with_store(url, body)


def test_a_bad_release_is_aborted_with_the_reason_in_the_log(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, leader = Arms("a"), Controller(store, "one", CLOCK)
        await started(store)
        await follower(store, arms).look()
        assert await store.lead("one")
        await leader.look()
        broken = Outcome(
            took_ms=3, failed=False, late=False, degraded=True, candidates=9, missing_rows=0, cold=False, shown=20
        )
        await served(store, arms, broken)
        await leader.look()

        current = await store.current()
        assert current.release is not None
        assert current.release.state == "aborted"
        last = (await store.audit())[-1]
        assert (last.who, last.action) == ("controller", "abort")
        assert last.why.startswith("degraded_share: ")
        await follower(store, arms).look()
        assert all(assigned_to(arms, f"u{i}") == "stable" for i in range(200))

    with_store(url, body)


def control(store: GrayStore, *gateways: str, ready: bool = True) -> Control:
    entries = [Entry("gateway", name, "", "a", 1, 1, "h") for name in gateways]
    if ready:
        entries += [Entry(role, role, "", "b", 2, 1, "h", {"shard": 0}) for role in ("shard", "edge", "rerank")]
    return Control(store, "a", 1, lambda: entries, CLOCK)


async def sound(_: Plan) -> None:
    """A directory that is what it says."""


def test_an_operator_starts_pauses_and_aborts(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, operator = Arms("a"), control(store, "gw")
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
        arms, operator = Arms("a"), control(store, "gw")
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
        arms, operator = Arms("a"), control(store)
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
