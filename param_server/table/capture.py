"""Copying the CPU table of one moment in pieces, while it goes on changing.

Every entry carries the stamp of its last change. A capture has a number; entries whose stamp is in (since, number]
belong to it. Whoever is about to change such an entry first has it copied aside (`save`); all others are copied as the
capture walks the entries once. Invariant: what `take` gives out is the table as it was when the capture began.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from param_server.contract import I64
from param_server.table import Export
from param_server.table import kernels_cpu as kernels

# One walk looks at no more entries than this for each it may copy: a table with few changes is not walked at once.
_LOOKED_AT_PER_ROW = 64

Arrays = tuple[
    np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any],
    np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any],
]  # fmt: skip


class CpuCapture:
    """`arrays` are slots, keys, states, versions, rows and stamps of the table; `used` its entries at the start."""

    def __init__(self, arrays: Arrays, since: int, number: int, used: int) -> None:
        self._slots, self._keys, self._states, self._versions, self._rows, self._stamps = arrays
        self._since = since
        self._number = number
        self._next = 0
        self._used = used
        self._saved: deque[Export] = deque()

    @property
    def number(self) -> int:
        """To be given as `since` to a later capture."""
        return self._number

    def save(self, keys: I64) -> None:
        """Copy aside what these keys hold, as far as it belongs here and was not given out: they are to change."""
        if self._next >= self._used:
            return
        entries = np.empty(keys.size, np.int64)
        count = kernels.about_to_change(
            self._slots, self._keys, self._stamps, keys, self._since, self._number, self._next, self._used, entries
        )
        if count:
            self._saved.append(self._copy(entries[:count]))

    def take(self, most_rows: int) -> Export | None:
        """The next piece of about `most_rows` entries, perhaps empty; None when everything was given out."""
        if self._saved:
            return self._saved.popleft()
        if self._next >= self._used:
            return None
        entries = np.empty(most_rows, np.int64)
        end = min(self._used, self._next + most_rows * _LOOKED_AT_PER_ROW)
        count, self._next = kernels.changed(self._stamps, self._since, self._number, self._next, end, entries)
        return self._copy(entries[:count])

    def _copy(self, entries: I64) -> Export:
        return Export(
            self._keys[entries],
            self._versions[entries],
            self._states[entries] == kernels.TOMBSTONE,
            self._rows[entries],
        )
