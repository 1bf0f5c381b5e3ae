"""Records on their way to a log: accepted without blocking, sent by one thread, each with a future of its offset.

Knows no Kafka: the connection is made by `_connect`. Refuses more records and bytes than it may hold. Invariant: a
record that was accepted is settled exactly once, with its offset or with an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from infra.errors import LogUnavailable, Overloaded, TrirankError

logger = logging.getLogger(__name__)

_CONNECT_S = 3.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """One record waiting for its acknowledgement; `expires_s` is monotonic."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes
    expires_s: float
    future: Future[int] = field(default_factory=Future)

    @property
    def size(self) -> int:
        """Payload bytes."""
        return len(self.value) + len(self.key or b"")


class SendLink(Protocol):
    """A connection that writes records."""

    def send(self, record: Outgoing, settle: Callable[[int | TrirankError], None]) -> None:
        """Hand over one record; `settle` is called once, from any thread, with the offset or the error."""

    def broken(self) -> bool:
        """Whether this connection can never send again."""

    def close(self, timeout_s: float) -> None:
        """Send what was handed over, settle the rest with an error, end the connection."""


class Outbox:
    """Sends records from any thread without blocking it; connects, reconnects and starts afresh by itself."""

    def __init__(
        self,
        bootstrap: str,
        *,
        delivery_timeout_s: float = 120.0,
        max_pending: int = 20_000,
        max_pending_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self._bootstrap = bootstrap
        self._delivery_timeout_s = delivery_timeout_s
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._waiting: deque[Outgoing] = deque()
        self._pending = 0
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._link: SendLink | None = None

    def _connect(self, timeout_s: float) -> SendLink:
        """Connect. Raises LogUnavailable."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the sending thread; the broker may still be away."""
        self._thread = threading.Thread(target=self._run, name="log-producer", daemon=True)
        self._thread.start()

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        """Accept one record and return the future of its offset, which is set once the log has acknowledged it.

        Never blocks longer than `wait_s`, the time to wait for room. Raises Overloaded when there is none,
        LogUnavailable when closed. The future fails with LogUnavailable when the record was not acknowledged within
        the delivery timeout (it may still be written), with Permanent when the broker will never take it.
        """
        record = Outgoing(topic, partition, key, value, time.monotonic() + self._delivery_timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closing.is_set() or self._has_room(record), wait_s):
                raise Overloaded(f"log: {self._pending} records wait for the broker already")
            if self._closing.is_set():
                raise LogUnavailable("log: the producer is closed")
            self._pending += 1
            self._pending_bytes += record.size
            self._waiting.append(record)
            self._changed.notify_all()
        return record.future

    def flush(self, timeout_s: float) -> None:
        """Wait until every accepted record is settled; look at the futures for how. Raises LogUnavailable."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending == 0, timeout_s):
                raise LogUnavailable(f"log: {self._pending} records are not acknowledged after {timeout_s:g} s")

    def pending(self) -> int:
        """Records accepted and not yet settled."""
        return self._pending

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is accepted for up to `timeout_s`, fail the rest with LogUnavailable; may be called twice."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0, timeout_s if self._thread else 0.0)
            self._closing.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._link is not None:
            self._link.close(max(0.1, end_s - time.monotonic()))
            self._link = None

    def _run(self) -> None:
        # The first record should not pay for the connection.
        with contextlib.suppress(LogUnavailable):
            self._link = self._connect(min(self._delivery_timeout_s, _CONNECT_S))
        while (record := self._take()) is not None:
            # From here on a caller can no longer cancel: the record may reach the log.
            if not record.future.set_running_or_notify_cancel():
                self._settle(record, None)
                continue
            try:
                self._ready_link(record).send(record, partial(self._settle, record))
            except TrirankError as error:
                self._settle(record, error)
            except Exception:
                logger.exception("handing a record to the log failed")
                self._settle(record, LogUnavailable("log: the record could not be handed over"))

    def _take(self) -> Outgoing | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting.popleft() if self._waiting else None

    def _ready_link(self, record: Outgoing) -> SendLink:
        if self._link is not None and self._link.broken():
            logger.warning("the log's producer can no longer send and is replaced")
            self._link.close(0.0)
            self._link = None
        while self._link is None:
            left_s = record.expires_s - time.monotonic()
            if left_s <= 0 or self._closing.is_set():
                raise LogUnavailable(f"log: no broker at {self._bootstrap}")
            try:
                self._link = self._connect(min(left_s, _CONNECT_S))
            except LogUnavailable:
                self._closing.wait(min(left_s, _RETRY_S))
        return self._link

    def _settle(self, record: Outgoing, outcome: int | TrirankError | None) -> None:
        if isinstance(outcome, int):
            record.future.set_result(outcome)
        elif outcome is not None:
            record.future.set_exception(outcome)
        with self._changed:
            self._pending -= 1
            self._pending_bytes -= record.size
            self._changed.notify_all()

    def _has_room(self, record: Outgoing) -> bool:
        # A record larger than the bound still goes through when it is alone.
        fits = self._pending_bytes + record.size <= self._max_pending_bytes or self._pending == 0
        return fits and self._pending < self._max_pending
