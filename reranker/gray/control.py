"""What an operator can do to the gray release: create, start, weigh, pause, resume, promote, abort, roll back.

Refuses a second gray release while one is open, a start before every live gateway and every tier has the candidate
release, and a change that was decided on an older version. Invariant: `abort` and `rollback` return when every live
gateway serves by the new split, or say which one does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from infra.clock import Clock
from infra.directory import Entry
from infra.errors import Permanent
from reranker.gray.controller import Analysis
from reranker.gray.plan import Plan, check_plan
from reranker.gray.state import Action, GrayRelease, TransitionRefused, Verdict, change
from reranker.gray.store import Current, GrayStore

OPEN = ("draft", "running", "paused")
ACKNOWLEDGED_WITHIN_S = 5.0
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
    """Which live gateways serve by the new split, after how long, and what they still answered by an older one."""

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
    ) -> None:
        self.store = store
        self._base = base
        self._n_shards = n_shards
        self._entries = entries
        self._clock = clock

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
        """Wait until every live gateway serves by this split or by one that came after it, at most 5 s."""
        began_s = self._clock.monotonic_s()
        while True:
            acks, newest = await self.store.acks(), await self.store.current()
            live = [entry.name for entry in self._entries() if entry.role == "gateway"]
            behind = tuple(name for name in live if name not in acks or acks[name].head != newest.head)
            took_s = self._clock.monotonic_s() - began_s
            if not behind or took_s > ACKNOWLEDGED_WITHIN_S:
                inflight = sum(acks[name].in_flight for name in live if name in acks)
                acked = len(live) - len(behind)
                return Acknowledged(current.version, acked, len(live), behind, round(took_s * 1e3, 1), inflight)
            await asyncio.sleep(_LOOK_EVERY_S)

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
