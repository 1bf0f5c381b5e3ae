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

    def earlier_by(self, seconds: float) -> Deadline:
        """The same deadline with a reserve kept back for the stages that follow."""
        return Deadline(self.at_s - seconds)

    def at_most(self, seconds: float, *, now_s: float | None = None) -> Deadline:
        """This deadline, or `seconds` from now if that is sooner."""
        return Deadline(min(self.at_s, (time.monotonic() if now_s is None else now_s) + seconds))
