"""The thread that reads a shard's partitions: connects, decodes, fills the feed, tells of gaps in the log.

Touches no table. It stays through every failure of the broker; a log that was lost or cut off is reported through the
feed, in order with the records, and read on from where it now begins. Invariant: records enter the feed in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from infra.errors import TrirankError
from infra.log import LogGap, LogLost, Record
from param_server import metrics
from param_server.contract import BadRecord, decode_batch
from param_server.feed import Feed, Gap, LogChange
from param_server.updates import StreamRecord

logger = logging.getLogger(__name__)

_POLL_S = 0.25
# Enough that polling costs little, and few enough that the first does not wait long for the decoding of the last.
_POLL_RECORDS = 64
_POLL_SMALL_RECORDS = 1024
_SMALL_BYTES = 8192
_RETRY_S = 0.5

Cause = Literal["unavailable", "unexpected"]


class LogReader(Protocol):
    """What is needed of `infra.kafka.LogConsumer`."""

    @property
    def identity(self) -> str: ...
    def start(self) -> None: ...
    def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]: ...
    def seek(self, partition: int, offset: int) -> None: ...
    def highwater(self) -> dict[int, int]: ...
    def connected(self) -> bool: ...
    def close(self) -> None: ...


class StreamReader:
    """Runs `reader` in its own thread; `wake` is called whenever the owner of the tables should look at the feed."""

    def __init__(self, reader: LogReader, feed: Feed, wake: Callable[[], None]) -> None:
        self._reader = reader
        self._feed = feed
        self._wake = wake
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._highwater: Mapping[int, int] = {}
        self._next: dict[int, int] = {}
        self._gaps: list[Gap] = []
        self._told = ""
        self._connected = False
        self._most = _POLL_RECORDS

    @property
    def highwater(self) -> Mapping[int, int]:
        """Offset after the newest record of each partition, as last heard."""
        return self._highwater

    @property
    def connected(self) -> bool:
        """Whether the broker answers."""
        return self._connected

    def start(self) -> None:
        """Start the thread; the broker may still be away."""
        self._thread = threading.Thread(target=self._run, name="stream-reader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connections."""
        self._stopping.set()
        self._feed.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            if self._connect():
                while not self._stopping.is_set():
                    self._step()
        finally:
            self._reader.close()

    def _connect(self) -> bool:
        while not self._stopping.is_set():
            try:
                self._reader.start()
            except TrirankError as error:
                logger.warning("the log cannot be read yet", extra={"error": error})
                self._failed("unavailable")
            else:
                return True
        return False

    def _step(self) -> None:
        try:
            for record in self._poll():
                waiting = self._feed.put(_decoded(record))
                if waiting == 0:
                    return
                self._next[record.partition] = record.offset + 1
                if waiting == 1:
                    # Whoever has more to take looks again by itself.
                    self._wake()
            self._connected = self._reader.connected()
            self._wake()
        except TrirankError as error:
            logger.warning("reading the log failed; trying again", extra={"error": error})
            self._retry("unavailable")
        except Exception:
            # The outermost loop: a shard that no longer follows the stream must say so, not end.
            logger.exception("reading the log failed in an unexpected way; trying again")
            self._retry("unexpected")

    def _poll(self) -> list[Record]:
        """Records, after every gap that lies before them was put into the feed."""
        while True:
            try:
                records = self._reader.poll(0.0 if self._gaps else _POLL_S, self._most)
            except LogGap as gap:
                logger.error("updates are gone from the log", extra={"reason": gap})
                self._reader.seek(gap.partition, gap.resume_at)
                self._next[gap.partition] = gap.resume_at
                self._gaps.append(Gap(gap.partition, gap.position, gap.resume_at, isinstance(gap, LogLost)))
            else:
                break
        self._highwater = self._reader.highwater()
        small = all(len(record.value or b"") < _SMALL_BYTES for record in records)
        self._most = _POLL_SMALL_RECORDS if records and small else _POLL_RECORDS
        if self._gaps or self._reader.identity != self._told:
            self._told = self._reader.identity
            self._feed.put(LogChange(self._told, tuple(self._gaps)))
            self._gaps.clear()
        return records

    def _retry(self, cause: Cause) -> None:
        """Read again what was polled and did not reach the feed."""
        self._connected = False
        for partition, offset in self._next.items():
            self._reader.seek(partition, offset)
        self._failed(cause)

    def _failed(self, cause: Cause) -> None:
        metrics.LOG_FAILURES.labels(cause).inc()
        self._wake()
        self._stopping.wait(_RETRY_S)


def _decoded(record: Record) -> StreamRecord:
    # A record may have no value at all; it is kept as an empty one.
    value = record.value or b""
    try:
        return StreamRecord(record.partition, record.offset, value, decode_batch(value))
    except BadRecord as error:
        return StreamRecord(record.partition, record.offset, value, error)
