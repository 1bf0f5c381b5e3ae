"""Feedback events: their form in the log, and the loop that brings them into the histories in Redis.

The loop stays through outages of Redis and of the broker and goes on where it was. Refuses records it cannot read:
they go to the dead-letter topic with the reason (`{"reason", "detail", "topic", "partition", "offset"}` as the key) and
hold up nothing. Invariant: the position of a record is stored together with its effect, and never before its dead
letter is in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from feature_service import metrics
from feature_service.hashing import ITEM, USER, key_of
from feature_service.schema import FeatureSchema
from feature_service.store import HistoryEvent
from infra.errors import LogUnavailable, Permanent, RedisUnavailable, TrirankError
from infra.log import LogGap, LogLost, Record

logger = logging.getLogger(__name__)

IMPRESSION = "impression"
# Scores of Redis' sorted sets are exact up to here; the year 2255.
MAX_TS_US = 2**53 - 1

_POLL_S = 0.5
_POLL_RECORDS = 1000
_RETRY_S = 0.2
_LETTER_TIMEOUT_S = 5.0

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Reason = Literal["not_json", "invalid", "unknown_event"]


class FeedbackEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of one user with one item; `ts_us` is microseconds since 1970-01-01 UTC.

    An impression of a whole reply names its first item, and all of them in `items`.
    """

    user_id: Id
    item_id: Id
    event: Id
    ts_us: Annotated[int, Meta(ge=0, le=MAX_TS_US)]
    recommendation_id: Annotated[str, Meta(max_length=256)] | None = None
    items: tuple[Id, ...] = ()


class BadEvent(Permanent):
    """A record that is no feedback event. Action: dead letter."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FeedbackEvent).decode
_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


def encode_event(event: FeedbackEvent) -> bytes:
    """JSON bytes of one event."""
    return _encode(event)


def decode_event(value: bytes) -> FeedbackEvent:
    """The event in a record's value. Raises BadEvent. Unknown fields are ignored: a newer producer may add some."""
    try:
        return _decode(value)
    except msgspec.ValidationError as error:
        raise BadEvent("invalid", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadEvent("not_json", str(error)) from error


def events_in(record: Record) -> list[Record]:
    """A record with an array of events as one record per event, each with its own JSON; any other record as it is."""
    if not record.value.startswith(b"["):
        return [record]
    try:
        return [replace(record, value=bytes(value)) for value in _split(record.value)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [record]


class LogReader(Protocol):
    """What is needed of `infra.kafka.LogConsumer`."""

    @property
    def identity(self) -> str: ...
    def start(self) -> None: ...
    def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]: ...
    def seek(self, partition: int, offset: int) -> None: ...
    def positions(self) -> dict[int, int]: ...
    def highwater(self) -> dict[int, int]: ...
    def close(self) -> None: ...


class LogWriter(Protocol):
    """What is needed of `infra.kafka.LogProducer`."""

    def send(self, topic: str, partition: int, value: bytes, key: bytes | None = None) -> Future[int]: ...


class Histories(Protocol):
    """What is needed of `feature_service.store.HistoryWriter`."""

    def positions(self) -> tuple[dict[int, int], str | None]: ...
    def apply(
        self, events: Sequence[HistoryEvent], positions: Mapping[int, int], identity: str, counts: Mapping[str, int]
    ) -> None: ...


class FeedbackLoop:
    """Applies the feedback topic in a thread of its own. `open_reader(positions, identity)` makes the reader."""

    def __init__(
        self,
        histories: Histories,
        open_reader: Callable[[Mapping[int, int], str | None], LogReader],
        letters: LogWriter,
        schema: FeatureSchema,
        *,
        topic: str,
        deadletter_topic: str,
    ) -> None:
        self._histories = histories
        self._open_reader = open_reader
        self._letters = letters
        self._history_events = frozenset(schema.history_events)
        self._topic = topic
        self._deadletter_topic = deadletter_topic
        self._reader: LogReader | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._totals: Counter[str] = Counter()
        self._new_here = False
        self._lag = 0

    def start(self) -> None:
        """Start the thread; Redis and the broker may still be away."""
        self._thread = threading.Thread(target=self._run, name="feedback-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch at hand and end the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def health(self) -> dict[str, Any]:
        """Counts since the start of this process, and the lag in records."""
        names = ("events", "impressions", "dead_letters", "log_losses", "log_truncations", "failures")
        return {"lag": self._lag, **{name: self._totals[name] for name in names}}

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._round()
        finally:
            self._close_reader()

    def _round(self) -> None:
        """One batch; after a failure everything is opened again from the positions in Redis."""
        try:
            if self._reader is None:
                self._open()
            self._step()
        except TrirankError as error:
            logger.warning("feedback waits", extra={"reason": error})
            self._failed("redis" if isinstance(error, RedisUnavailable) else "log")
        except Exception:
            logger.exception("feedback waits after an unexpected failure")
            self._failed("unexpected")

    def _failed(self, cause: Literal["redis", "log", "unexpected"]) -> None:
        metrics.FAILURES.labels(cause).inc()
        self._totals["failures"] += 1
        self._close_reader()
        self._stopping.wait(_RETRY_S)

    def _open(self) -> None:
        positions, identity = self._histories.positions()
        reader = self._open_reader(positions, identity)
        reader.start()
        self._reader = reader
        self._new_here = identity is None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _step(self) -> None:
        """Read a batch, write its dead letters, then apply it together with the positions after it."""
        reader = self._reader
        if reader is None:
            return
        gaps, records = self._poll(reader)
        if records or gaps:
            self._apply(records, reader)
        ends, positions = reader.highwater(), reader.positions()
        self._lag = sum(max(0, end - positions[p]) for p, end in ends.items())
        metrics.LOG_LAG.set(self._lag)

    def _poll(self, reader: LogReader) -> tuple[int, list[Record]]:
        """Records, and how many partitions had to be read on from another position."""
        gaps, kinds = 0, set[str]()
        while True:
            try:
                return gaps, reader.poll(0.0 if gaps else _POLL_S, _POLL_RECORDS)
            except LogGap as gap:
                reader.seek(gap.partition, gap.resume_at)
                gaps += 1
                if self._new_here and gap.position == 0:
                    # This stack begins where the log begins; it has missed nothing.
                    continue
                kind = "lost" if isinstance(gap, LogLost) else "truncated"
                # Once for the log, however many partitions it had; at once, as the next look at the log may fail.
                if kind not in kinds:
                    kinds.add(kind)
                    self._totals["log_losses" if kind == "lost" else "log_truncations"] += 1
                metrics.LOG_GAPS.labels(kind).inc()
                logger.error("feedback was lost before it could be applied", extra={"kind": kind, "reason": gap})

    def _apply(self, records: Sequence[Record], reader: LogReader) -> None:
        events: list[HistoryEvent] = []
        counts: Counter[str] = Counter()
        letters: list[tuple[Record, BadEvent]] = []
        for record in chain.from_iterable(map(events_in, records)):
            try:
                event = self._known(decode_event(record.value))
            except BadEvent as error:
                letters.append((record, error))
                continue
            counts[event.event] += max(1, len(event.items))
            if event.event != IMPRESSION:
                keys = key_of(USER, event.user_id), key_of(ITEM, event.item_id)
                events.append(HistoryEvent(*keys, event.event, event.ts_us))
        self._write_letters(letters)
        self._histories.apply(events, reader.positions(), reader.identity, counts)
        self._count(events, counts, records)

    def _known(self, event: FeedbackEvent) -> FeedbackEvent:
        if event.event != IMPRESSION and event.event not in self._history_events:
            raise BadEvent("unknown_event", f"{event.event} is not among {sorted(self._history_events)}")
        return event

    def _write_letters(self, letters: Sequence[tuple[Record, BadEvent]]) -> None:
        """Raises LogUnavailable when one is not acknowledged; the batch is then read again."""
        sent = [(error, self._letters.send(self._deadletter_topic, 0, record.value, self._about(record, error)))
                for record, error in letters]  # fmt: skip
        for error, future in sent:
            try:
                future.result(_LETTER_TIMEOUT_S)
            except TimeoutError as late:
                raise LogUnavailable("log: a dead letter was not acknowledged") from late
            except Permanent as refused:
                logger.error("a dead letter cannot be written", extra={"reason": error.reason, "error": refused})
            metrics.DEAD_LETTERS.labels(error.reason).inc()
            self._totals["dead_letters"] += 1
            logger.warning("a feedback record goes to the dead-letter topic", extra={"reason": error})

    def _about(self, record: Record, error: BadEvent) -> bytes:
        return msgspec.json.encode(
            {
                "reason": error.reason,
                "detail": error.detail,
                "topic": self._topic,
                "partition": record.partition,
                "offset": record.offset,
            }
        )

    def _count(self, events: Sequence[HistoryEvent], counts: Counter[str], records: Sequence[Record]) -> None:
        impressions = counts[IMPRESSION]
        self._totals.update(events=len(events), impressions=impressions)
        metrics.EVENTS.labels("history").inc(len(events))
        metrics.EVENTS.labels("impression").inc(impressions)
        if records:
            oldest_ms = min(record.timestamp_ms for record in records)
            metrics.EVENT_AGE_SECONDS.observe(max(0.0, time.time() - oldest_ms / 1000))
