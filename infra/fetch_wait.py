"""How long a broker may hold a fetch for which it has nothing yet. Pure: the time is handed in."""

from __future__ import annotations

from collections.abc import Mapping

_DURABLE_MS = 500
HOLD_MS = 20
_MOST_MS = 10_000
# Measured on the embedded broker: a fetch walks 0.75 ms per thousand batches; twice that leaves room for load.
_PER_RECORD_MS = 1.5e-3

_STARVED_AFTER_WAITS = 5
_STARVED_FOR_S = 60.0


def fetch_wait_ms(*, durable: bool, records: int, starved: int = 0, least_ms: int = HOLD_MS) -> int:
    """How long the broker may hold an empty fetch, in milliseconds.

    Apache Kafka answers a held fetch when data arrives. The embedded broker looks again at half, three quarters, ...
    of the wait, so the wait is the latency; but it gives up a fetch that walks the log for longer than the wait, and
    would then never answer: the wait grows with the `records` read so far, and doubles each time a reader `starved`.
    """
    if durable:
        return _DURABLE_MS
    grown = max(least_ms, int(records * _PER_RECORD_MS))
    return min(grown << starved, _MOST_MS)


class FetchPace:
    """The wait of one reader, from what it has seen: it grows with the log, and while the reader starves."""

    def __init__(self, least_ms: int = HOLD_MS) -> None:
        self._least_ms = least_ms
        self._wait_ms = 0
        self._starved = 0
        self._starved_s = self._progress_s = 0.0

    def forget(self) -> None:
        """The connection is a new one and has been told no wait yet."""
        self._wait_ms = 0

    def next_ms(self, ends: Mapping[int, int], *, durable: bool, behind: bool, now_s: float) -> int | None:
        """The wait to tell the connection, None if it stays.

        `ends`: offset after the newest record of each partition. `behind`: the broker is there and has records that
        the last fetch, which was empty, did not bring.
        """
        if not behind:
            self._progress_s = now_s
            if self._starved and now_s - self._starved_s > _STARVED_FOR_S:
                self._starved, self._starved_s = self._starved - 1, now_s
        elif now_s - self._progress_s > _STARVED_AFTER_WAITS * self._wait_ms / 1000:
            self._starved, self._starved_s, self._progress_s = self._starved + 1, now_s, now_s
        records = sum(ends.values())
        wait_ms = fetch_wait_ms(durable=durable, records=records, starved=self._starved, least_ms=self._least_ms)
        if wait_ms == self._wait_ms:
            return None
        self._wait_ms = wait_ms
        return wait_ms
