"""What the gateway knows of the items: id, title, categories by key; and the popular ones, for when all else is gone.

Loaded from the release; items that came later are added as they are met (`learn`). Refuses to rank: it holds names,
not rows. Invariant: the row number of an item never changes, and an item that is known stays known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import CATEGORY, key_of
from infra.release import Item

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

UNKNOWN = -1
MAX_LEARNED = 100_000


class Catalogue:
    """Items by key. Category weights are made per request: their cost follows what the items asked for have, not
    the number of items times the number of categories."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items: list[Item] = []
        self._sorted_keys = np.empty(0, np.int64)
        self._sorted_rows = np.empty(0, np.int64)
        self._column_of: dict[str, int] = {}
        self._category_keys = np.empty(0, np.int64)
        self._counts = np.zeros(1, np.int64)
        self._columns = np.empty(0, np.int64)
        self._append(items)
        self._n_of_release = len(self._items)
        self._most_events = max((item.events for item in items), default=0)

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, keys: I64) -> I64:
        """Row numbers i64[n] of keys i64[n]; UNKNOWN for items nobody has told of."""
        if not self._items:
            return np.full(keys.size, UNKNOWN, np.int64)
        at = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._items) - 1)
        return np.where(self._sorted_keys[at] == keys, self._sorted_rows[at], UNKNOWN)

    def item(self, row: int) -> Item:
        """The item in one row."""
        return self._items[row]

    def popular(self, k: int, excluded: Collection[int]) -> list[int]:
        """Row numbers of the first k items of the release (most popular first) that are not excluded."""
        of_release = range(self._n_of_release)
        return list(islice((row for row in of_release if self._items[row].key not in excluded), k))

    def popularity(self, row: int) -> float:
        """Events of an item in the training period over the most any item has; 0 for UNKNOWN."""
        if row == UNKNOWN or not self._most_events:
            return 0.0
        return self._items[row].events / self._most_events

    def learn(self, items: Iterable[Item]) -> None:
        """Add items that came after the release; known ones and those beyond MAX_LEARNED are left out."""
        room = self._n_of_release + MAX_LEARNED - len(self._items)
        given = {item.key: item for item in reversed(list(items))}
        known = self.rows(np.fromiter(given, np.int64, len(given))) != UNKNOWN
        new = [item for item, is_known in zip(given.values(), known.tolist(), strict=True) if not is_known]
        if new[:room]:
            self._append(new[:room])

    @property
    def category_keys(self) -> I64:
        """Keys of all categories, i64[C], by column."""
        return self._category_keys

    def columns_of(self, rows: I64) -> I64:
        """Distinct category columns of some items, ascending."""
        return np.unique(self._ragged(rows)[1])

    def category_weights(self, rows: I64, columns: I64) -> F32:
        """Weights f32[n, len(columns)]: 1 over the number of an item's categories, 0 for the others.

        `columns` is ascending; a category that is not in it (an item learned a moment ago) counts for nothing.
        """
        owners, cols = self._ragged(rows)
        weights = np.zeros((rows.size, columns.size), np.float32)
        if columns.size == 0:
            return weights
        at = np.minimum(np.searchsorted(columns, cols), columns.size - 1)
        listed = columns[at] == cols
        if not listed.all():
            owners, at = owners[listed], at[listed]
        weights[owners, at] = self._share[rows[owners]]
        return weights

    def _ragged(self, rows: I64) -> tuple[I64, I64]:
        """(index into rows, column) of every category of these rows; unknown rows have none."""
        counts = self._counts[rows]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if ends.size else 0
        owners = np.repeat(np.arange(rows.size), counts)
        within = np.arange(total) - np.repeat(ends - counts, counts)
        return owners, self._columns[self._starts[rows][owners] + within]

    def _append(self, items: Sequence[Item]) -> None:
        column_of = self._column_of
        per_item = [
            [column_of.setdefault(name, len(column_of)) for name in dict.fromkeys(item.categories)] for item in items
        ]
        first = len(self._items)
        self._items.extend(items)
        keys = np.array([item.key for item in items], np.int64)
        order = np.argsort(keys)
        at = np.searchsorted(self._sorted_keys, keys[order])
        self._sorted_keys = np.insert(self._sorted_keys, at, keys[order])
        self._sorted_rows = np.insert(self._sorted_rows, at, first + order)
        # One more entry than items: row UNKNOWN (-1) is the last one, and it has no categories.
        self._counts = np.concatenate((self._counts[:-1], np.array([*map(len, per_item), 0], np.int64)))
        self._starts = np.cumsum(self._counts) - self._counts
        self._columns = np.concatenate((self._columns, np.array([c for cols in per_item for c in cols], np.int64)))
        self._share = (1.0 / np.maximum(self._counts, 1)).astype(np.float32)
        known = self._category_keys.size
        new = [key_of(CATEGORY, name) for name in list(column_of)[known:]]
        self._category_keys = np.concatenate((self._category_keys, np.array(new, np.int64)))
