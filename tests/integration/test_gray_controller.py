"""The controller over a real Redis: up step by step, and down with the reason in the log."""

from __future__ import annotations

import asyncio

import pytest

from reranker.gray.arms import Arms
from reranker.gray.controller import Controller
from reranker.gray.store import GrayStore
from reranker.gray.tally import Outcome
from tests.integration.gray_redis import CLOCK, FINE, assigned_to, follower, lasting_arms, started, with_store


@pytest.fixture(autouse=True)
def leaders_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader's lease outlasts a test, however slow the machine."""
    monkeypatch.setattr("reranker.gray.store.LEASE_S", 3600.0)


async def served(store: GrayStore, arms: Arms, outcome: Outcome, n: int = 4000) -> None:
    """Requests of many users, counted and told."""
    for i in range(n):
        assigned = arms.assign(user_id=f"u{i}", session_id=None, request_id="")
        arms.tally.answered(assigned, outcome if assigned.arm == "candidate" else FINE)
    await follower(store, arms).look()


def test_a_good_release_goes_up_step_by_step_and_no_step_twice(url: str) -> None:
    async def body(store: GrayStore) -> None:
        arms, leaders = lasting_arms(), [Controller(store, token, CLOCK) for token in ("one", "two")]
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
        arms, leader = lasting_arms(), Controller(store, "one", CLOCK)
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
