"""The engine of a replica that cannot fail alone: engines in order, each request answered by the first that can.

An engine that raises, or gives scores that are not finite for inputs that are, is out of the rotation at once; the
batch in hand goes to the next engine, and the keeper finds out off the request path whether it may come back. Refuses
to blame an engine for a request: inputs that are not finite fail alone, and so does a batch that no engine can score
while one of them still scores a recorded request. Invariant: only the server's thread takes engines out of the
rotation, so an engine that is being run is never closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Batching, Padded
from infra.engine.choose import Check, Offer, choose
from infra.engine.keeper import Keeper, Member
from infra.engine.metrics import FAILURES, RESCUED, run_seconds
from infra.engine.run import NonFiniteScores
from infra.errors import Permanent, TrirankError

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]
Batch = tuple[F32, F32, F32, F32]
Failure = Literal["raised", "not_finite"]


class EngineChain:
    """Runs batches on the best engine that works. `start()` raises ReleaseRefused when none does."""

    def __init__(
        self,
        role: str,
        offers: Sequence[Offer],
        check: Check,
        *,
        measured: bool = True,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._offers = offers
        self._check = check
        self._measured = measured
        self._clock_s = clock_s
        self._keeper: Keeper | None = None
        self._answered: Member | None = None
        self._running_since_s: float | None = None

    def start(self) -> None:
        """Choose the engine to begin with, and let the keeper begin."""
        opened, rest, refusals = choose(self._role, self._offers, self._check, measured=self._measured)
        members = [Member(one.offer, one.engine) for one in opened] + [Member(offer) for offer in rest]
        self._keeper = Keeper(self._role, members, self._check, self._clock_s)
        self._keeper.refusals.update({refusal.name: refusal for refusal in refusals})
        self._keeper.start()
        self._answered = members[0]

    @property
    def kind(self) -> str:
        """Of the engine that answered last."""
        return self._last().offer.kind

    @property
    def precision(self) -> str:
        """Of the engine that answered last."""
        return self._last().offer.precision

    @property
    def batching(self) -> Batching:
        """Of the engine that answers next, if it does not fail."""
        rotation = () if self._keeper is None else self._keeper.rotation
        engine = rotation[0].engine if rotation else None
        return Padded() if engine is None else engine.batching

    @property
    def able(self) -> bool:
        """Whether an engine is left to answer with."""
        return self._keeper is not None and bool(self._keeper.rotation)

    def running_s(self) -> float:
        """How long the run in hand has lasted, 0 when there is none."""
        since_s = self._running_since_s
        return 0.0 if since_s is None else self._clock_s() - since_s

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """As `infra.engine.run.Engine.run`, by the first engine that can. Raises NonFiniteScores or Permanent when the
        request is to blame, or no engine is left."""
        if self._keeper is None:
            raise Permanent(f"{self._role}: no engine was chosen yet")
        batch = (hist, target, mask, user)
        failed: list[tuple[Member, Failure]] = []
        error: TrirankError = Permanent(f"{self._role}: no engine is left")
        for member in self._keeper.rotation:
            try:
                scores = self._run(member, batch)
            except NonFiniteScores as not_finite:
                if not all(np.isfinite(array).all() for array in batch):
                    raise
                failed.append((member, "not_finite"))
                error = not_finite
            except TrirankError as raised:
                failed.append((member, "raised"))
                error = raised
            else:
                if failed:
                    self._rescued(self._keeper, failed, hist.shape[0], error)
                return scores
        return self._last_resort(self._keeper, failed, batch, error)

    def state(self) -> dict[str, object]:
        """For the directory and `trirank status`."""
        keeper = self._keeper
        ready = () if keeper is None else keeper.rotation
        refusals = {} if keeper is None else dict(keeper.refusals)
        return {
            "engine": ready[0].offer.kind if ready else "none",
            "precision": ready[0].offer.precision if ready else "",
            "engines_ready": [member.name for member in ready],
            "engines_refused": {name: f"{refusal.cause}: {refusal.reason}" for name, refusal in refusals.items()},
        }

    def close(self) -> None:
        """Stop the keeper and close every engine; only after the last `run`."""
        if self._keeper is not None:
            self._keeper.stop()

    def _run(self, member: Member, batch: Batch) -> F32:
        began_s, self._running_since_s = time.perf_counter(), self._clock_s()
        try:
            scores = member.run(*batch)
        except TrirankError:
            raise
        except Exception as error:  # foreign code; whatever it raises, the next engine is tried
            raise Permanent(f"{member.name}: {error}") from error
        finally:
            self._running_since_s = None
        run_seconds(self._role, member.name).observe(time.perf_counter() - began_s)
        self._answered = member
        return scores

    def _rescued(
        self, keeper: Keeper, failed: Sequence[tuple[Member, Failure]], n_requests: int, error: TrirankError
    ) -> None:
        """The next engine answered: what failed before it is out until the keeper has examined it."""
        RESCUED.labels(self._role).inc(n_requests)
        for member, cause in failed:
            self._count(member, cause, error)
            keeper.suspect(member, raised=cause == "raised")

    def _last_resort(
        self, keeper: Keeper, failed: Sequence[tuple[Member, Failure]], batch: Batch, error: TrirankError
    ) -> F32:
        """Every engine failed: the request is to blame if one of them is sound; otherwise a new one is opened now."""
        broken = [(member, cause) for member, cause in failed if not keeper.sound(member)]
        for member, cause in broken:
            self._count(member, cause, error)
        if len(broken) < len(failed):
            for member, cause in broken:
                keeper.suspect(member, raised=cause == "raised")
            raise error
        replacement = keeper.replace([member for member, _ in broken]) if broken else None
        if replacement is None:
            raise error
        scores = self._run(replacement, batch)
        RESCUED.labels(self._role).inc(batch[0].shape[0])
        return scores

    def _count(self, member: Member, cause: Failure, error: TrirankError) -> None:
        FAILURES.labels(self._role, member.name, cause).inc()
        logger.warning(
            "an engine failed a batch",
            extra={"role": self._role, "engine": member.name, "cause": cause, "reason": str(error)},
        )

    def _last(self) -> Member:
        if self._answered is None:
            raise Permanent(f"{self._role}: no engine was chosen yet")
        return self._answered
