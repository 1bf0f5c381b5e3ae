"""The deadline of one request, handed down from tier to tier.

A deadline is a point on the local monotonic clock; on the wire it travels as the time that is left,
because clocks of two machines do not agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time (seconds)."""

    at_s: float

    @classmethod
    def after(cls, seconds: float, *, now_s: float | None = None) -> Deadline:
        """The deadline `seconds` from now."""
        return cls((time.monotonic() if now_s is None else now_s) + seconds)

    def remaining_s(self, *, now_s: float | None = None) -> float:
        """Seconds left; negative when it is over."""
        return self.at_s - (time.monotonic() if now_s is None else now_s)
