"""Copying a table that loses rows as it was at one moment, in pieces, while it goes on changing.

Entries are walked once; whoever is about to change or lose one that belongs here puts a copy into `saved` before.
Invariant: what `take` gives out is the table as it was when the capture began, each entry once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from param_server.contract import I64
from param_server.table import Export


class EvictingCapture:
    """`copy(entries, limit)` copies those with a stamp up to `limit`; `used` are the entries there were."""

    def __init__(self, copy: Callable[[I64, int], Export], used: int, number: int) -> None:
        self._copy = copy
        self._next = 0
        self._used = used
        self._limit = 2 * number + 1
        self.number = number
        self.saved: deque[Export] = deque()

    @property
    def bounds(self) -> tuple[int, int, int]:
        """First entry not given out, the end, and the greatest stamp that belongs here."""
        return self._next, self._used, self._limit

    def take(self, most_rows: int) -> Export | None:
        """The next piece of about `most_rows` entries, perhaps empty; None when everything was given out."""
        if self.saved:
            return self.saved.popleft()
        if self._next >= self._used:
            return None
        start, self._next = self._next, min(self._next + most_rows, self._used)
        return self._copy(np.arange(start, self._next), self._limit)
