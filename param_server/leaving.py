"""Rows that have left the tables of a shard and are not yet acknowledged by the cold tier: kept, looked up, written to.

Invariant: a row is dropped only when the state it is in now was acknowledged. For one thread; does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from param_server.rowstate import RowState, Verdict, Write, written


class Departure(NamedTuple):
    """One row on its way down. `order`: every write to the key before this place in the log is in it."""

    key: int
    state: RowState
    order: int
    ticket: int


class Leaving:
    """The rows by key, and the order in which they go."""

    def __init__(self) -> None:
        self._rows: dict[int, Departure] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Departure]:
        return iter(self._rows.values())

    @property
    def queued(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queue)

    def get(self, key: int) -> RowState | None:
        """What is known of the key here."""
        row = self._rows.get(key)
        return row.state if row is not None else None

    def put(self, key: int, state: RowState, order: int) -> None:
        """Add a row, or replace it by a newer state; it will be sent."""
        self._ticket += 1
        self._rows[key] = Departure(key, state, order, self._ticket)
        self._queue.append((key, self._ticket))

    def write(self, key: int, write: Write, order: int) -> Verdict:
        """Apply a write to a row that is here."""
        state, verdict = written(self._rows[key].state, write)
        if verdict is Verdict.APPLIED and state is not None:
            self.put(key, state, order)
        return verdict

    def batch(self, most: int) -> list[Departure]:
        """The next rows to send, oldest first; they stay here until acknowledged."""
        sent: list[Departure] = []
        while self._queue and len(sent) < most:
            key, ticket = self._queue.popleft()
            row = self._rows.get(key)
            if row is not None and row.ticket == ticket:
                sent.append(row)
        return sent

    def acknowledge(self, sent: list[Departure]) -> None:
        """Drop what was written below, unless it has changed since."""
        for row in sent:
            if self._rows.get(row.key) is row:
                del self._rows[row.key]
