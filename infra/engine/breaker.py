"""When an engine that failed may be tried again: a circuit breaker with a growing pause. Pure; time comes in.

Closed: the engine serves. Open: it does not, until the pause is over. Then one trial is due (half-open); a trial that
fails opens it again for twice as long. An engine that served well for `quiet_s` after its last trip starts over with
the first pause. Invariant: a flapping engine is tried once per pause, and the pause never shrinks while it flaps.
"""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
QUIET_S = 120.0
# So many failures within the window are too many, even of an engine that scores the recorded requests as it should.
MAX_FAILURES = 3
WINDOW_S = 30.0


class Breaker:
    """The breaker of one engine of one replica."""

    def __init__(
        self,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._quiet_s = quiet_s
        self._pause_s = first_pause_s
        self._until_s: float | None = None
        self._closed_s: float | None = None
        self._failures_s: list[float] = []

    @property
    def open(self) -> bool:
        """Whether the engine is kept out."""
        return self._until_s is not None

    def failed(self, now_s: float) -> bool:
        """Note one failure of an engine that may still be sound; whether it has failed too often."""
        self._failures_s = [at for at in self._failures_s if now_s - at < WINDOW_S] + [now_s]
        return len(self._failures_s) >= MAX_FAILURES

    def trip(self, now_s: float) -> float:
        """Keep the engine out; the pause in seconds."""
        if self._closed_s is not None:
            served_well = now_s - self._closed_s >= self._quiet_s
            self._pause_s = self._first_pause_s if served_well else self._next_pause()
        elif self.open:
            self._pause_s = self._next_pause()
        self._until_s, self._closed_s = now_s + self._pause_s, None
        self._failures_s.clear()
        return self._pause_s

    def trial_due_s(self, now_s: float) -> float:
        """Seconds until a trial is due, 0 when it is; infinity when the engine is not kept out."""
        return float("inf") if self._until_s is None else max(0.0, self._until_s - now_s)

    def close(self, now_s: float) -> None:
        """The trial went well: the engine serves again."""
        self._until_s, self._closed_s = None, now_s

    def _next_pause(self) -> float:
        return min(self._longest_pause_s, 2 * self._pause_s)
