"""What happened to one request on its way: which release serves it, how long each stage took, what failed and why.

Everything here ends up in the reply, in the metrics, or both. Invariant: a stage that failed is in `reasons`, once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Note how long a stage took, failed or not."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            self.timing_ms[stage] = round(took_s * 1e3, 3)
            stage_seconds(stage, self.assignment.arm).observe(took_s)

    def failed(self, stage: str, error: TrirankError) -> None:
        """Note that a stage gave nothing usable, and why."""
        STAGE_FAILURES.labels(stage, cause_of(error)).inc()
        self.degrade(stage)

    def degrade(self, reason: str) -> None:
        """Note that the answer lacks something."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            DEGRADED.labels(reason, self.assignment.arm).inc()


def cause_of(error: TrirankError) -> str:
    """The value of the `cause` label."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "failed")
