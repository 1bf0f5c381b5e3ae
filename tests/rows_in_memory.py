"""A parameter server in this process: changes become visible so many steps late, as over a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from reranker.remote.rows import Change, Rows


class RowsInMemory:
    """`late` steps pass before a change is visible, unless a fetch asks for it."""

    def __init__(self, dims: Mapping[str, int], *, late: int = 0) -> None:
        self._dims = dims
        self._late = late
        self._rows: dict[str, dict[int, np.ndarray]] = {table: {} for table in dims}
        self._waiting: list[tuple[int, Sequence[Change]]] = []
        self.published = 0
        self.rows_published = 0

    def check(self, schema_fingerprint: str, n_rows: Mapping[str, int]) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def fetch(self, keys: Mapping[str, np.ndarray], applied: int) -> Future[Mapping[str, Rows]]:
        while self._waiting and (self._waiting[0][0] <= applied or len(self._waiting) > self._late):
            self._apply(self._waiting.pop(0)[1])
        answer: Future[Mapping[str, Rows]] = Future()
        answer.set_result({table: self._lookup(table, wanted) for table, wanted in keys.items()})
        return answer

    def publish(self, step: int, changes: Sequence[Change]) -> None:
        assert step == self.published, "steps are published one after another"
        self.published += 1
        self.rows_published += sum(change.keys.size for change in changes)
        self._waiting.append((step, changes))

    def held(self) -> Mapping[str, Mapping[int, np.ndarray]]:
        """Everything, whatever still waits included."""
        while self._waiting:
            self._apply(self._waiting.pop(0)[1])
        return self._rows

    def _lookup(self, table: str, keys: np.ndarray) -> Rows:
        rows = np.zeros((keys.size, self._dims[table]), np.float32)
        found = np.array([key in self._rows[table] for key in keys.tolist()], np.bool_)
        for i, key in enumerate(keys.tolist()):
            rows[i] = self._rows[table].get(key, rows[i])
        return Rows(rows, found)

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            table = self._rows[change.table]
            for key, row in zip(change.keys.tolist(), change.rows, strict=True):
                if change.first:
                    table.setdefault(key, row.copy())
                else:
                    table[key] = table.get(key, 0.0) + row
