"""What happens to engines off the request path: suspects are examined, stand-ins opened, the fallen tried again.

One thread per replica, asleep unless an engine failed or a trial is due. Every engine is examined with the recorded
requests, never with somebody's request. Refuses to open a heavy engine while a light one serves. Invariant: `rotation`
holds the engines that may answer, best first; it is replaced as a whole, so a reader needs no lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from infra.engine.breaker import Breaker
from infra.engine.choose import WANTED, Check, Offer, Opened, Refusal, close_quietly, open_engine
from infra.engine.metrics import FAULTS, SERVING, TRIPPED
from infra.engine.run import Engine
from infra.errors import Permanent

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]
_JOIN_S = 5.0


class State(Enum):
    """What a member is doing."""

    CLOSED = "not opened"
    READY = "ready"
    SUSPECT = "suspect"
    OUT = "out"


class Member:
    """One engine of a replica, and its breaker."""

    def __init__(self, offer: Offer, engine: Engine | None = None, breaker: Breaker | None = None) -> None:
        self.offer = offer
        self.name = offer.name
        self.engine = engine
        self.state = State.CLOSED if engine is None else State.READY
        self.breaker = breaker or Breaker()
        self.raised_too_often = False

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """As the engine does; raises Permanent when there is none."""
        if self.engine is None:
            raise Permanent(f"{self.name}: not opened")
        return self.engine.run(hist, target, mask, user)


class Keeper:
    """Keeps the members of one replica. `step` does what is due; the thread calls it."""

    def __init__(self, role: str, members: Sequence[Member], check: Check, clock_s: Callable[[], float]) -> None:
        self._role = role
        self._members = list(members)
        self._check = check
        self._clock_s = clock_s
        self.rotation: tuple[Member, ...] = ()
        self.refusals: dict[str, Refusal] = {}
        self._states = threading.Lock()
        self._work = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=f"engines-{role}", daemon=True)
        self._rotate()

    def start(self) -> None:
        """Begin to keep."""
        self._thread.start()

    def stop(self) -> None:
        """End, and close every engine; nobody may run one any more."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        with self._work:
            self._set(self._members, State.CLOSED)
            for member in self._members:
                self._close(member)

    def suspect(self, member: Member, *, raised: bool) -> None:
        """Take an engine that failed out of the rotation until it has been examined. Only for the thread that runs
        engines; does not wait."""
        if raised and member.breaker.failed(self._clock_s()):
            member.raised_too_often = True
        self._set([member], State.SUSPECT)
        self._wake.set()

    def sound(self, member: Member) -> bool:
        """Whether an engine still scores recorded requests as it should. Only for the thread that runs engines."""
        return self._examine(member)

    def replace(self, unsound: Sequence[Member]) -> Member | None:
        """Take broken engines out and open another one at once: the same engine afresh, or the next; None when none
        can be opened. Only for the thread that runs engines, which waits."""
        with self._work:
            for member in unsound:
                self._trip(member)
            afresh = [member for member in unsound if not member.offer.heavy]
            unopened = [member for member in self._members if member.state is State.CLOSED]
            for member in (*afresh, *unopened):
                if self._open(member):
                    self._wake.set()
                    return member
        self._wake.set()
        return None

    def step(self) -> float | None:
        """Do what is due; seconds until something else will be, None when nothing will."""
        with self._work:
            for member in self._in(State.SUSPECT):
                self._judge(member)
            self._try_the_fallen()
            self._stand_in()
        now_s = self._clock_s()
        due_s = min((member.breaker.trial_due_s(now_s) for member in self._in(State.OUT)), default=float("inf"))
        return None if due_s == float("inf") else due_s

    def _loop(self) -> None:
        pause_s: float | None = None
        while not self._stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            try:
                pause_s = None if self._stopping else self.step()
            except Exception:
                FAULTS.labels(self._role).inc()
                logger.exception("the engines could not be looked after", extra={"role": self._role})
                pause_s = 1.0

    def _judge(self, member: Member) -> None:
        if member.raised_too_often or not self._examine(member):
            self._trip(member)
            return
        logger.info("an engine serves again", extra={"role": self._role, "engine": member.name})
        self._set([member], State.READY)

    def _examine(self, member: Member) -> bool:
        if member.engine is None:
            return False
        try:
            self._check.quick(member.engine)
        except Exception as error:  # noqa: BLE001 - foreign code; any failure is the answer
            logger.warning(
                "an engine fails recorded requests",
                extra={"role": self._role, "engine": member.name, "reason": str(error)},
            )
            return False
        return True

    def _trip(self, member: Member) -> None:
        self._set([member], State.OUT)
        member.raised_too_often = False
        pause_s = member.breaker.trip(self._clock_s())
        TRIPPED.labels(self._role, member.name).inc()
        logger.error(
            "an engine is taken out of service",
            extra={"role": self._role, "engine": member.name, "trial_in_s": pause_s},
        )
        self._close(member)

    def _try_the_fallen(self) -> None:
        for member in self._in(State.OUT):
            if member.breaker.trial_due_s(self._clock_s()) > 0:
                continue
            if not self._open(member):
                member.breaker.trip(self._clock_s())

    def _stand_in(self) -> None:
        """Open engines until there are enough; heavy ones only when nothing else is left."""
        for member in self._in(State.CLOSED):
            if self._stopping or len(self.rotation) >= WANTED or (self.rotation and member.offer.heavy):
                return
            if not self._open(member):
                self._members.remove(member)

    def _open(self, member: Member) -> bool:
        result = open_engine(self._role, member.offer, self._check)
        if not isinstance(result, Opened):
            self.refusals[member.name] = result
            return False
        self.refusals.pop(member.name, None)
        member.engine = result.engine
        if member.breaker.open:
            member.breaker.close(self._clock_s())
        self._set([member], State.READY)
        logger.info("an engine is ready", extra={"role": self._role, "engine": member.name})
        return True

    def _close(self, member: Member) -> None:
        if member.engine is not None:
            close_quietly(member.engine)
            member.engine = None

    def _in(self, state: State) -> list[Member]:
        return [member for member in self._members if member.state is state]

    def _set(self, members: Iterable[Member], state: State) -> None:
        with self._states:
            for member in members:
                member.state = state
            self._rotate()

    def _rotate(self) -> None:
        rotation = tuple(member for member in self._members if member.state is State.READY)
        if rotation[:1] != self.rotation[:1]:
            for member in self.rotation[:1]:
                SERVING.labels(self._role, member.name).set(0)
            for member in rotation[:1]:
                SERVING.labels(self._role, member.name).set(1)
        self.rotation = rotation
