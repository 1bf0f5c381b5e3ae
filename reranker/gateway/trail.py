"""What happened to one request on its way: which release serves it, how long each stage took, what failed and why.

Everything here ends up in the reply, in the metrics, or both. Invariant: a stage that failed is in `reasons`, once.
"""

from __future__ import annotations

import time

from infra.errors import DeadlineExceeded, Overloaded, PeerGone, RedisUnavailable, TrirankError
from reranker.gateway.metrics import DEGRADED, STAGE_FAILURES, stage_seconds
from reranker.gray.split import Assignment

_CAUSES: tuple[tuple[type[TrirankError], str], ...] = (
    (DeadlineExceeded, "late"),
    (PeerGone, "gone"),
    (RedisUnavailable, "gone"),
    (Overloaded, "overloaded"),
)


class Trail:
    """The trail of one request."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.reasons: list[str] = []
        self.timing_ms: dict[str, float] = {}
        self.engines: dict[str, str] = {}

    def timed(self, stage: str) -> _Timed:
        """A context that notes how long a stage took, failed or not."""
        return _Timed(self, stage)

    def failed(self, stage: str, error: TrirankError) -> None:
        """Note that a stage gave nothing usable, and why."""
        STAGE_FAILURES.labels(stage, cause_of(error)).inc()
        self.degrade(stage)

    def degrade(self, reason: str) -> None:
        """Note that the answer lacks something."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            DEGRADED.labels(reason, self.assignment.lane).inc()


class _Timed:
    """Cheaper than a generator: there are four in every request."""

    __slots__ = ("_began_s", "_stage", "_trail")

    def __init__(self, trail: Trail, stage: str) -> None:
        self._trail = trail
        self._stage = stage

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        took_s = time.perf_counter() - self._began_s
        self._trail.timing_ms[self._stage] = round(took_s * 1e3, 3)
        stage_seconds(self._stage, self._trail.assignment.lane).observe(took_s)


def cause_of(error: TrirankError) -> str:
    """The value of the `cause` label."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "failed")
