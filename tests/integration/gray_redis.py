"""A gray release in a real Redis: a store, a plan, gateways that follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from infra.clock import SystemClock
from infra.directory import Entry
from reranker.gray.arms import Arms
from reranker.gray.control import Control
from reranker.gray.follower import Follower
from reranker.gray.plan import HARD_GATES, Plan, Step
from reranker.gray.state import GrayRelease, change
from reranker.gray.store import Current, GrayStore
from reranker.gray.tally import Outcome

CLOCK = SystemClock()
PLAN = Plan(
    name="g", stable="a", candidate="b", path="/b", gates=HARD_GATES[:3],
    steps=(Step(weight_ppm=100_000, hold_s=0, min_samples=100), Step(weight_ppm=500_000, hold_s=0, min_samples=100)),
)  # fmt: skip
FINE = Outcome(took_ms=3, failed=False, late=False, degraded=False, candidates=9, missing_rows=0, cold=False, shown=20)


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


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let the loop turn until the condition holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "not in time"
        await asyncio.sleep(0.005)


def follower(store: GrayStore, arms: Arms, name: str = "gw", *, loaded: tuple[str, ...] = ("a", "b")) -> Follower:
    async def load(_: Current) -> tuple[str, ...]:
        return loaded

    return Follower(store, arms, name, load, CLOCK)


def lasting_arms() -> Arms:
    """Arms whose lease does not end while a busy machine goes through a test."""
    return Arms("a", lease_s=3600.0)


def assigned_to(arms: Arms, user: str) -> str:
    return arms.assign(user_id=user, session_id=None, request_id="").arm


def control(store: GrayStore, *gateways: str, ready: bool = True) -> Control:
    entries = [Entry("gateway", name, "", "a", 1, 1, "h") for name in gateways]
    if ready:
        entries += [Entry(role, role, "", "b", 2, 1, "h", {"shard": 0}) for role in ("shard", "edge", "rerank")]
    return Control(store, "a", 1, lambda: entries, CLOCK)


async def sound(_: Plan) -> None:
    """A directory that is what it says."""
