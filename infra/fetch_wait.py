"""How long a broker may hold a fetch for which it has nothing yet. Pure."""

from __future__ import annotations

_DURABLE_MS = 500
HOLD_MS = 20
_MOST_MS = 10_000
# Measured on the embedded broker: a fetch walks 0.75 ms per thousand batches; twice that leaves room for load.
_PER_RECORD_MS = 1.5e-3


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
