"""The queue between the thread that reads the log and the thread that owns the tables: bounded by bytes, in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from param_server.updates import StreamRecord


@dataclass(frozen=True, slots=True)
class Gap:
    """Records of one partition that are gone: `lost` with the whole log, or cut off by retention."""

    partition: int
    position: int
    resume_at: int
    lost: bool


@dataclass(frozen=True, slots=True)
class LogChange:
    """What follows in the feed belongs to the log of this identity; `gaps` say what could not be read before it."""

    identity: str
    gaps: tuple[Gap, ...] = ()


FeedItem = StreamRecord | LogChange
_ITEM_BYTES = 1024


class Feed:
    """One writer, one reader. `max_bytes` may be exceeded by one record, so that none is too large."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[FeedItem] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: FeedItem) -> int:
        """Add an item, waiting for room; how many wait now, 0 when the feed was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._bytes < self._max_bytes)
            if self._closed:
                return 0
            self._items.append(item)
            self._bytes += _size(item)
            return len(self._items)

    def take(self) -> FeedItem | None:
        """The next item, or None at once."""
        with self._changed:
            if not self._items:
                return None
            return self._pop()

    def take_run(self, most_rows: int) -> list[StreamRecord] | LogChange | None:
        """The next item, with the records after it that may be applied together up to `most_rows`; or None at once."""
        with self._changed:
            if not self._items:
                return None
            first = self._pop()
            if isinstance(first, LogChange):
                return first
            run, rows = [first], first.rows
            while self._items and isinstance(ahead := self._items[0], StreamRecord):
                rows += ahead.rows
                if rows > most_rows or not ahead.joins(first):
                    break
                run.append(ahead)
                self._pop()
            return run

    def close(self) -> None:
        """Let a waiting writer go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pop(self) -> FeedItem:
        item = self._items.popleft()
        self._bytes -= _size(item)
        self._changed.notify()
        return item

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items


def _size(item: FeedItem) -> int:
    """Bytes of the record and of what was decoded of it; something for every item, so that all are bounded."""
    return 2 * len(item.value) + _ITEM_BYTES if isinstance(item, StreamRecord) else _ITEM_BYTES
