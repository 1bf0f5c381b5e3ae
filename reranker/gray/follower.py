"""One gateway follows the gray release: takes every new split, says so, and tells what it has counted.

A change is pushed and, should that be lost, read within a second. It is acknowledged once no request assigned by an
older split is on its way any more. Every read that finds the split in force renews the gateway's lease to serve the
candidate release. A Redis that refuses connections is known to change nothing, so the split stands still; one that is
silent may have told others of an abort, so the lease runs out (`arms`). An older split than the one in force is
not followed: a Redis that lost its last second must not bring back what was aborted. Invariant: a split is followed
only when this gateway has loaded every release it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from infra.clock import Clock
from infra.errors import RedisRefused, TrirankError
from reranker.gray.arms import Arms
from reranker.gray.audit import GENESIS
from reranker.gray.store import Ack, Current, GrayStore

logger = logging.getLogger(__name__)

READ_EVERY_S = 1.0
DRAIN_S = 1.0
_DRAIN_STEP_S = 0.002

# Loads what the current gray release needs and returns the names of all releases this gateway can serve.
Load = Callable[[Current], Awaitable[Collection[str]]]


class Follower:
    """Keeps `arms` at the newest split of the store."""

    def __init__(self, store: GrayStore, arms: Arms, gateway: str, load: Load, clock: Clock) -> None:
        self._store = store
        self._arms = arms
        self._gateway = gateway
        self._load = load
        self._clock = clock
        self._head = GENESIS

    async def run(self) -> None:
        """Follow until cancelled."""
        reached = True
        while True:
            try:
                await self.look()
                await self._store.wait_for_change(READ_EVERY_S)
                reached = True
            except TrirankError as error:
                if reached:
                    logger.warning("the gray release cannot be followed; it stands still", extra={"reason": str(error)})
                reached = False
                await asyncio.sleep(READ_EVERY_S)
            except Exception:  # the outermost loop
                logger.exception("following the gray release failed")
                await asyncio.sleep(READ_EVERY_S)

    async def look(self) -> None:
        """Read, follow, acknowledge, tell. Raises RedisUnavailable."""
        began_s = self._clock.monotonic_s()
        try:
            current = await self._store.current()
        except RedisRefused:
            self._arms.hold(began_s)
            raise
        if current.head == self._head:
            self._arms.renew(began_s)
        releases = tuple(sorted(await self._load(current)))
        split = current.split
        if split is not None and current.head != self._head:
            missing = {split.stable, split.candidate or split.stable} - set(releases)
            if missing:
                logger.error("a release of the split is not loaded here", extra={"release": sorted(missing)[0]})
            elif not self._arms.follow(split):
                logger.error(
                    "Redis is behind what this gateway serves by; it keeps that", extra={"version": split.version}
                )
            else:
                self._head = current.head
                self._arms.renew(began_s)
                await self._drained(split.version)
        version = self._arms.split.version
        in_flight = self._arms.flying_before(version)
        ack = Ack(version, self._head, self._clock.now_us(), in_flight, releases)
        await self._store.acknowledge(self._gateway, ack)
        await self._tell()

    async def _drained(self, version: int) -> None:
        end_s = self._clock.monotonic_s() + DRAIN_S
        while self._arms.flying_before(version) and self._clock.monotonic_s() < end_s:
            await asyncio.sleep(_DRAIN_STEP_S)

    async def _tell(self) -> None:
        tally = self._arms.tally
        if tally.epoch:
            epoch, places = tally.epoch, tally.new_places()
            await self._store.tell(epoch, self._gateway, tally.figures(), places)
            tally.told(epoch, places)
