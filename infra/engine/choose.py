"""Which engine serves: offers in order, each loaded, warmed up and compared with the recorded scores.

Serves only what agrees. Every refusal has a cause, is logged with its reason and counted; none is fatal while another
engine is left. Invariant: what is opened here has scored every recorded request as it should, on this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from infra.engine.metrics import REFUSED
from infra.engine.names import engine_name, on_gpu
from infra.engine.run import Engine, EngineDamaged, EngineUnavailable
from infra.errors import ReleaseRefused

logger = logging.getLogger(__name__)

Cause = Literal["unavailable", "damaged", "disagrees", "failed"]
# The one that serves, and one to fall back on.
WANTED = 2


class EngineDisagrees(ReleaseRefused):
    """An engine that scores recorded requests otherwise than they were recorded. Action: take the next one."""


class Check(Protocol):
    """How an engine is put to the test. All raise EngineDisagrees, and what the engine raises."""

    def whole(self, engine: Engine) -> None:
        """Every recorded request, and every shape that serving has."""

    def quick(self, engine: Engine) -> None:
        """A few recorded requests."""

    def seconds(self, engine: Engine) -> float:
        """Time on a core of one usual request, for engines of the CPU."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine that may be opened. `heavy`: opening it takes seconds or hundreds of megabytes (it brings torch or a
    GPU's libraries along), so it is not opened before it is needed."""

    kind: str
    precision: str
    make: Callable[[], Engine]
    heavy: bool = False

    @property
    def name(self) -> str:
        """As in settings, labels and replies."""
        return engine_name(self.kind, self.precision)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an offer does not serve."""

    name: str
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that has passed."""

    offer: Offer
    engine: Engine


def open_engine(role: str, offer: Offer, check: Check) -> Opened | Refusal:
    """Load and check one engine; nothing of it is left behind when it is refused."""
    engine: Engine | None = None
    try:
        engine = offer.make()
        engine.load()
        check.whole(engine)
    except Exception as error:  # noqa: BLE001 - foreign code; whatever it raises, the next engine is tried
        if engine is not None:
            close_quietly(engine)
        refusal = Refusal(offer.name, _cause(error), str(error) or type(error).__name__)
        REFUSED.labels(role, offer.name, refusal.cause).inc()
        level = logging.INFO if refusal.cause == "unavailable" else logging.ERROR
        logger.log(
            level,
            "an engine is not served",
            extra={"role": role, "engine": offer.name, "cause": refusal.cause, "reason": refusal.reason},
        )
        return refusal
    return Opened(offer, engine)


def choose(
    role: str, offers: Sequence[Offer], check: Check, *, measured: bool
) -> tuple[list[Opened], list[Offer], list[Refusal]]:
    """The engine to serve with and one to fall back on, in this order; the offers not opened; the refusals.

    `measured`: where no engine on a GPU passes, the fastest FP32 one on this CPU comes first. Raises ReleaseRefused
    when none passes.
    """
    opened: list[Opened] = []
    rest: list[Offer] = []
    refusals: list[Refusal] = []
    for offer in offers:
        compared = measured and not any(on_gpu([one.offer.name]) for one in opened)
        if (len(opened) >= WANTED and not compared) or (opened and offer.heavy):
            rest.append(offer)
            continue
        result = open_engine(role, offer, check)
        if isinstance(result, Refusal):
            refusals.append(result)
        else:
            opened.append(result)
    if not opened:
        raise ReleaseRefused(f"{role}: no engine can serve: " + "; ".join(f"{r.name}: {r.reason}" for r in refusals))
    if measured and not on_gpu([opened[0].offer.name]):
        opened = fastest_first(role, opened, check)
    for surplus in reversed(opened[WANTED:]):
        close_quietly(surplus.engine)
        rest.insert(0, surplus.offer)
    logger.info(
        "an engine is chosen",
        extra={"role": role, "engine": opened[0].offer.name, "standby": [one.offer.name for one in opened[1:WANTED]]},
    )
    return opened[:WANTED], rest, refusals


def fastest_first(role: str, opened: Sequence[Opened], check: Check) -> list[Opened]:
    """The same engines: FP32 by speed, then the lower precisions by speed. So every replica gives the trained models'
    scores, however its measurement came out; INT8 leads where a setting names it first."""
    if len(opened) < 2:
        return list(opened)
    # In turn, three times, and the best of each counts: a busy neighbour slows both or neither.
    rounds = [[check.seconds(one.engine) for one in opened] for _ in range(3)]
    seconds = [min(times) for times in zip(*rounds, strict=True)]
    logger.info(
        "engines are compared",
        extra={"role": role, **{one.offer.name: round(s * 1e3, 3) for one, s in zip(opened, seconds, strict=True)}},
    )
    return [
        opened[i] for i in sorted(range(len(opened)), key=lambda i: (opened[i].offer.precision != "fp32", seconds[i]))
    ]


def close_quietly(engine: Engine) -> None:
    """Close an engine that has failed already; what it raises now changes nothing."""
    try:
        engine.close()
    except Exception as error:  # noqa: BLE001 - foreign code at its end
        logger.warning("an engine could not be closed", extra={"engine": engine.kind, "reason": str(error)})


def _cause(error: Exception) -> Cause:
    if isinstance(error, EngineDamaged):
        return "damaged"
    if isinstance(error, EngineUnavailable | ImportError):
        return "unavailable"
    if isinstance(error, EngineDisagrees):
        return "disagrees"
    return "damaged" if isinstance(error, ReleaseRefused) else "failed"
