"""The queue between the thread that reads the log and the thread that owns the tables: bounded by rows, in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from param_server.contract import UpdateBatch
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


class Feed:
    """One writer, one reader. `max_rows` may be exceeded by one record, so that none is too large."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._items: deque[FeedItem] = deque()
        self._rows = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: FeedItem) -> bool:
        """Add an item, waiting for room; False when the feed was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._rows < self._max_rows)
            if self._closed:
                return False
            self._items.append(item)
            self._rows += _rows(item)
            return True

    def take(self) -> FeedItem | None:
        """The next item, or None at once."""
        with self._changed:
            if not self._items:
                return None
            item = self._items.popleft()
            self._rows -= _rows(item)
            self._changed.notify()
            return item

    def close(self) -> None:
        """Let a waiting writer go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items


def _rows(item: FeedItem) -> int:
    # Every item counts, so that a flood of bad records is bounded too.
    return item.content.keys.size if isinstance(item, StreamRecord) and isinstance(item.content, UpdateBatch) else 1
