"""The gray release in a real Redis: commits on top of what was read, leases that fence, counts that add up."""

from __future__ import annotations

import asyncio

import pytest

from infra.redis import connect
from reranker.gray.audit import split_at, verify_chain
from reranker.gray.split import SplitPlan
from reranker.gray.state import change
from reranker.gray.store import Conflict, GrayStore
from reranker.gray.tally import Sample
from tests.integration.gray_redis import CLOCK, FINE, lasting_arms, started, with_store


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


def test_a_leader_that_lost_its_lease_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reranker.gray.store.LEASE_S", 3600.0)

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
        with connect(url) as redis:
            assert 0 < int(redis.pttl("t:gray:lease")) <= 3000
        while not await store.lead("heir"):
            await asyncio.sleep(0.05)

    with_store(url, body)


def test_counts_of_all_gateways_add_up_and_units_are_counted_once(url: str) -> None:
    async def body(store: GrayStore) -> None:
        one, other = lasting_arms(), lasting_arms()
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
