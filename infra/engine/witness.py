"""Which engine was at work when a process died: one that takes its process with it is tried last by the next process.

A library that crashes cannot be caught. So a replica notes the engine it opens or serves with in a file of its own, and
takes the file away when it ends in order. The next replica of that role on this machine finds the files of those that
did not. Refuses to keep an engine out for good: it is only tried last, and only for a while, because a process may be
killed for reasons of its own. Invariant: with one engine, nothing changes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from infra.engine.choose import Offer
from infra.engine.run import Engine
from infra.lifecycle import alive

logger = logging.getLogger(__name__)

# So many deaths within the window are an engine's fault rather than the machine's.
MAX_DEATHS = 3
WINDOW_S = 300.0


class Witness:
    """The notes of one process of a role, in a folder that the role's processes on this machine share."""

    def __init__(
        self, folder: Path, role: str, *, pid: int | None = None, now_s: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._role = role
        self._pid = os.getpid() if pid is None else pid
        self._now_s = now_s
        self._noted = ""
        self.blamed: frozenset[str] = frozenset()

    def note(self, engine: str) -> None:
        """This engine is being opened, or serves, from now on."""
        if engine == self._noted:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{self._role}.{self._pid}.draft"
        draft.write_text(engine)
        draft.replace(self._mine())
        self._noted = engine

    def forget(self) -> None:
        """This process ends in order."""
        self._mine().unlink(missing_ok=True)
        self._noted = ""

    def order(self, offers: Sequence[Offer]) -> list[Offer]:
        """The same offers, those under which too many processes died lately at the end; opening one is noted."""
        self.blamed = self._deadly()
        if self.blamed:
            logger.error(
                "engines are tried last: processes died while they ran",
                extra={"role": self._role, "engines": sorted(self.blamed), "deaths": MAX_DEATHS, "within_s": WINDOW_S},
            )
        return [self._noting(offer) for offer in sorted(offers, key=lambda offer: offer.name in self.blamed)]

    def _noting(self, offer: Offer) -> Offer:
        def make() -> Engine:
            self.note(offer.name)
            return offer.make()

        return replace(offer, make=make)

    def _deadly(self) -> frozenset[str]:
        """Buries the dead first: their notes become the times of their deaths, which go when they are old."""
        for note in self._folder.glob(f"{self._role}.*.running"):
            pid = int(note.name.split(".")[1])
            if pid != self._pid and not alive(pid):
                self._move(note, self._folder / f"{self._role}.{pid}.{int(self._now_s() * 1e3)}.died")
        deaths: Counter[str] = Counter()
        for note in self._folder.glob(f"{self._role}.*.died"):
            if self._now_s() - int(note.name.split(".")[2]) / 1e3 > WINDOW_S:
                note.unlink(missing_ok=True)
                continue
            deaths[note.read_text()] += 1
        return frozenset(engine for engine, count in deaths.items() if count >= MAX_DEATHS)

    def _move(self, note: Path, to: Path) -> None:
        try:
            note.rename(to)
        except FileNotFoundError:
            return  # another replica has buried it

    def _mine(self) -> Path:
        return self._folder / f"{self._role}.{self._pid}.running"
