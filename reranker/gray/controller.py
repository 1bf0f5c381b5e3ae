"""The controller: one gateway at a time looks at the figures of all, decides, and acts.

Whoever holds the lease is the leader; it lasts two seconds, so another takes over within three when the leader dies. An
act is made on top of the version it was decided on and only under the leader's own lease: no step twice, no step lost.
What a step began with is kept in Redis, so a new leader judges it whole; only the newest minute begins anew with him.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

import msgspec

from infra.clock import Clock
from infra.errors import TrirankError
from reranker.gray.decide import Decision, decide
from reranker.gray.measures import Figures
from reranker.gray.readings import RECENT_S, Readings, Window
from reranker.gray.state import Action, GrayRelease, change
from reranker.gray.store import Conflict, Current, GrayStore
from reranker.gray.tally import Sample

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
WHO = "controller"

Sums = Mapping[Sample, Figures]


class Analysis(msgspec.Struct, frozen=True):
    """The newest decision, for whoever asks."""

    release: str
    version: int
    at_us: int
    decision: Decision


class Controller:
    """Runs in every gateway; acts in the one that leads."""

    def __init__(self, store: GrayStore, token: str, clock: Clock) -> None:
        self._store = store
        self._token = token
        self._clock = clock
        self._past: deque[tuple[float, Sums]] = deque()
        self._epoch = 0

    async def run(self) -> None:
        """Lead whenever nobody else does, until cancelled."""
        while True:
            try:
                if await self._store.lead(self._token):
                    await self.look()
                else:
                    self._past.clear()
            except Conflict as conflict:
                logger.info("another was faster", extra={"reason": str(conflict)})
            except TrirankError as error:
                logger.warning("the gray release cannot be judged", extra={"reason": str(error)})
            except Exception:  # the outermost loop
                logger.exception("judging the gray release failed")
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> Decision | None:
        """Judge the current gray release once, and act; None when there is nothing to judge.

        Raises Conflict when somebody else changed it or took the lease, RedisUnavailable.
        """
        current = await self._store.current()
        release = current.release
        if release is None or release.state not in ("running", "paused"):
            return None
        sums = await self._store.told(release.epoch)
        began = await self._store.mark(release.epoch, release.since_us, sums)
        now_us = self._clock.now_us()
        decision = decide(release, self._readings(release, sums, began), now_us)
        if decision.act != "hold":
            await self._act(current, release, decision, now_us)
        analysis = Analysis(release.plan.name, release.version, now_us, decision)
        await self._store.report(msgspec.json.encode(analysis))
        return decision

    async def _act(self, current: Current, release: GrayRelease, decision: Decision, now_us: int) -> None:
        actions: dict[str, Action] = {"step": "step", "promote": "promote", "pause": "pause", "abort": "abort"}
        action = actions[decision.act]
        changed = change(release, action, at_us=now_us, why=decision.sentence, verdict=decision.verdict)
        await self._store.commit(
            current, changed, action, who=WHO, why=decision.sentence, at_us=now_us, lease=self._token
        )
        logger.warning(
            "the gray release was changed",
            extra={"action": action, "release": release.plan.name, "why": decision.sentence},
        )

    def _readings(self, release: GrayRelease, sums: Sums, began: Sums) -> Readings:
        now_s = self._clock.monotonic_s()
        if release.epoch != self._epoch:
            self._epoch = release.epoch
            self._past.clear()
        if not self._past:
            # Nothing older is known to this leader: its newest minute begins now.
            self._past.append((now_s, sums))
        self._past.append((now_s, sums))
        while len(self._past) > 2 and self._past[0][0] < now_s - RECENT_S[-1]:
            self._past.popleft()
        before = [next(past for at_s, past in self._past if at_s >= now_s - span_s) for span_s in RECENT_S]
        return Readings(
            recent=tuple(window(sums, past) for past in before),
            step=window(sums, began),
            total=window(sums, {}),
        )


def window(sums: Sums, before: Sums) -> Window:
    """What was counted since `before`, as the samples of the gates."""

    def since(sample: Sample) -> Figures:
        return sums.get(sample, Figures()).minus(before.get(sample, Figures()))

    compared = since(Sample("candidate", True))
    return Window(
        candidate=compared.plus(since(Sample("candidate", False))),
        compared=compared,
        baseline=since(Sample("stable", True)),
        shadow=since(Sample("shadow", True)),
        shadowed=since(Sample("shadowed", True)),
    )
