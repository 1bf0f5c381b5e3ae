"""What an operator can do to the gray release: create, start, weigh, pause, resume, promote, abort, roll back.

Refuses a second gray release while one is open, a start before every live gateway and every tier has the candidate
release, and a change that was decided on an older version. Invariant: when `acknowledged` returns, every gateway
serves by the new split, or its lease to serve the candidate release has run out; it says which ones those are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from infra.clock import Clock
from infra.directory import Entry
from infra.errors import Permanent, RedisUnavailable
from reranker.gray.arms import LEASE_S
from reranker.gray.controller import Analysis
from reranker.gray.plan import Plan, check_plan
from reranker.gray.state import Action, GrayRelease, TransitionRefused, Verdict, change
from reranker.gray.store import Ack, Current, GrayStore

OPEN = ("draft", "running", "paused")
# A lease and this after a change, a gateway that has not heard of it serves stable only, by itself; this because two
# clocks do not run at quite the same speed.
SPARE_S = 0.5
# A Redis that goes away after a change was made has this long to come back; then nobody knows who has followed.
REDIS_BACK_S = 5.0
# A gateway whose newest acknowledgement is older than a lease and this is past its lease anyway.
RECENT_S = 7.0
_LOOK_EVERY_S = 0.005
# An analysis older than this says nothing about now.
FRESH_S = 5.0


class UnknownRelease(Permanent):
    """There is no gray release of that name."""


class VersionConflict(Permanent):
    """The release was changed since the caller read it."""


class NotReady(Permanent):
    """The candidate release is not served by every tier yet."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """How many gateways serve by the new split, after how long, and how many requests they had begun by an older one
    (those are answered by stable). `missing` did not say so in time: they do not serve the candidate release any more,
    because nobody has confirmed their split for as long as they may serve it."""

    generation: int
    acked: int
    gateways: int
    missing: tuple[str, ...]
    propagation_ms: float
    inflight: int


class Control:
    """Changes the gray release for one gateway's callers. `entries` is the directory as this gateway knows it."""

    def __init__(
        self,
        store: GrayStore,
        base: str,
        n_shards: int,
        entries: Callable[[], Sequence[Entry]],
        clock: Clock,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self._base = base
        self._n_shards = n_shards
        self._entries = entries
        self._clock = clock
        self._lease_s = lease_s

    async def get(self, name: str) -> Current:
        """What is in force. Raises UnknownRelease when the current gray release has another name."""
        current = await self.store.current()
        if current.release is None or current.release.plan.name != name:
            raise UnknownRelease(f"there is no gray release {name!r}")
        return current

    async def create(self, plan: Plan, *, who: str, verify: Callable[[Plan], Awaitable[None]]) -> Current:
        """A draft: the stack begins to bring up the candidate release. Raises InvalidInput, TransitionRefused,
        Conflict, and what `verify` raises when the directory is not that release."""
        check_plan(plan)
        current = await self.store.current()
        before = current.release
        if before is not None and before.state in OPEN:
            raise TransitionRefused(f"{before.plan.name} is {before.state}; promote or abort it first")
        serving = current.split.stable if current.split else self._base
        if plan.stable != serving:
            raise TransitionRefused(f"stable is {serving}, not {plan.stable}")
        await verify(plan)
        stable_path = before.paths.get(plan.stable, "") if before else ""
        now_us = self._clock.now_us()
        draft = GrayRelease(plan=plan, changed_us=now_us, stable_path=stable_path)
        return await self.store.commit(current, draft, "create", who=who, why="", at_us=now_us)

    async def act(
        self, name: str, action: Action, *, who: str, why: str, if_match: int | None, weight_ppm: int | None = None
    ) -> Current:
        """Change the release. Raises UnknownRelease, VersionConflict, TransitionRefused, NotReady, InvalidInput,
        Conflict."""
        current = await self.get(name)
        release = current.release
        if release is None:
            raise UnknownRelease(f"there is no gray release {name!r}")
        if if_match is not None and if_match != release.version:
            raise VersionConflict(f"{name} is at version {release.version}, not {if_match}")
        if action == "start" and (why_not := await self.store.trouble(release)):
            raise TransitionRefused(f"{release.plan.candidate} cannot be served: {why_not}; abort this draft")
        if action == "start" and (lacking := await self.lacking(release)):
            raise NotReady(f"{release.plan.candidate} is not served yet by: {', '.join(lacking)}")
        now_us = self._clock.now_us()
        verdict = await self._verdict(release, now_us) if action == "promote" else "inconclusive"
        changed = change(release, action, at_us=now_us, why=why, verdict=verdict, weight_ppm=weight_ppm)
        return await self.store.commit(current, changed, action, who=who, why=why, at_us=now_us)

    async def lacking(self, release: GrayRelease) -> list[str]:
        """Which tiers and gateways do not have the candidate release yet."""
        name = release.plan.candidate
        entries = self._entries()
        acks = await self.store.acks()
        lacking = [
            f"gateway {entry.name}"
            for entry in entries
            if entry.role == "gateway" and (entry.name not in acks or name not in acks[entry.name].releases)
        ]
        shards = {entry.meta.get("shard") for entry in entries if entry.role == "shard" and entry.release == name}
        lacking += [f"shard {index}" for index in range(self._n_shards) if index not in shards]
        lacking += [
            role for role in ("edge", "rerank") if not any(e.role == role and e.release == name for e in entries)
        ]
        return lacking

    async def acknowledged(self, current: Current) -> Acknowledged:
        """Wait until every gateway serves by this split or by one that came after it, or is fenced out by its lease.

        Raises RedisUnavailable when Redis goes away meanwhile: the change is made, but it is not known who follows it.
        """
        began_s = since_s = self._clock.monotonic_s()
        while True:
            try:
                acks, newest = await self.store.acks(), await self.store.current()
            except RedisUnavailable:
                # Who was refused meanwhile has kept his split for a lease that begins now.
                since_s = self._clock.monotonic_s()
                if since_s - began_s > REDIS_BACK_S:
                    raise
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            live = self._gateways(acks)
            behind = tuple(name for name in live if name not in acks or acks[name].head != newest.head)
            now_s = self._clock.monotonic_s()
            if not behind or now_s - since_s > self._lease_s + SPARE_S:
                inflight = sum(acks[name].in_flight for name in live if name in acks)
                acked, took_ms = len(live) - len(behind), round((now_s - began_s) * 1e3, 1)
                return Acknowledged(current.version, acked, len(live), behind, took_ms, inflight)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _gateways(self, acks: Mapping[str, Ack]) -> list[str]:
        """Gateways that may serve now: those of the directory, and those that were heard of a moment ago (one that is
        stopped leaves the directory before it is known to be harmless)."""
        since_us = self._clock.now_us() - (self._lease_s + RECENT_S) * 1e6
        listed = {entry.name for entry in self._entries() if entry.role == "gateway"}
        return sorted(listed | {name for name, ack in acks.items() if ack.at_us > since_us})

    async def analysis(self, name: str) -> Analysis | None:
        """The newest decision about the release; None before the first."""
        await self.get(name)
        raw = await self.store.analysis()
        found = msgspec.json.decode(raw, type=Analysis) if raw else None
        return found if found is not None and found.release == name else None

    async def _verdict(self, release: GrayRelease, now_us: int) -> Verdict:
        analysis = await self.analysis(release.plan.name)
        if analysis is None or analysis.version != release.version or now_us - analysis.at_us > FRESH_S * 1e6:
            return "inconclusive"
        return analysis.decision.verdict
