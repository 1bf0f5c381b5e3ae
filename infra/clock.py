"""Time as an argument, so that decisions can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the product may ask about time."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards; for durations and deadlines."""
        ...

    def now_us(self) -> int:
        """Microseconds since 1970-01-01 UTC; for event times."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards."""
        return time.monotonic()

    def now_us(self) -> int:
        """Microseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1000
