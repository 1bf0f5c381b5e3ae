"""How many requests this process works on at once; the next one is refused before its body is read.

A refusal costs no call, no parsing and no waiting. Invariant: `in_flight` is never above `max_in_flight`.
Single-threaded: belongs to one event loop.
"""

from __future__ import annotations

from types import TracebackType

from reranker.gateway import metrics
from reranker.gateway.problems import Problem

RETRY_AFTER_S = 1


class Admission:
    """A bounded count of requests; use it as a context manager around one request."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        self.shed = 0

    def __enter__(self) -> None:
        """Count the request in. Raises Problem (503) when the gateway is full."""
        if self.in_flight >= self._max_in_flight:
            self.shed += 1
            metrics.SHED.inc()
            raise Problem(
                "overloaded",
                f"{self.in_flight} requests are being answered; try again",
                retry_after_s=RETRY_AFTER_S,
            )
        self.in_flight += 1
        metrics.IN_FLIGHT.inc()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_flight -= 1
        metrics.IN_FLIGHT.dec()
