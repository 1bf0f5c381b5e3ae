"""The tables of one step: the rows its batches touch, addressed by the numbers the batches use.

`RowIndex` knows which rows there are and their keys, and holds none; `WorkingSet` stands where `Tables` stands while a
step is computed. Refuses nothing. Invariant: with all rows, it computes what `Tables` computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_ranker.samples import Batch
from edge_ranker.tables import Tables
from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, keys_of
from feature_service.schema import TABLE_IDS

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


class RowIndex:
    """`tables` gives the numbers of rows; its parameters are not looked at and may lie on no device."""

    def __init__(self, tables: Tables) -> None:
        schema = tables.schema
        self.tables = tables
        self.keys: dict[str, I64] = {
            "user": keys_of(USER, tables.user_names),
            "user_bucket": np.arange(schema.n_user_buckets, dtype=np.int64),
            "user_attribute": keys_of(ATTRIBUTE, tables.attributes),
            "item": keys_of(ITEM, tables.item_names),
            "category": keys_of(CATEGORY, tables.categories),
            "gap": np.arange(schema.n_gaps, dtype=np.int64),
        }

    def touched(self, batches: Sequence[Batch]) -> dict[str, I64]:
        """Row numbers of each table that these batches need, ascending."""
        tables = self.tables
        items = torch.cat([batch.items for batch in batches])
        users = torch.cat([batch.users for batch in batches])
        samples = [batch.recall_sample for batch in batches if batch.recall_sample is not None]
        # Without a sample the recall loss is over all items.
        all_items = torch.arange(self.keys["item"].size)
        of_items = torch.cat([tables.item_row[items], *samples]) if samples else all_items
        needed = {
            "user": tables.user_row[users],
            "user_bucket": tables.bucket_row[users],
            "user_attribute": _present(tables.user_attributes, tables.user_attribute_weights, users),
            "item": of_items,
            "category": _present(tables.item_categories, tables.item_category_weights, items),
            "gap": torch.arange(self.keys["gap"].size),
        }
        return {name: np.unique(numbers.numpy()) for name, numbers in needed.items()}

    def keys_for(self, numbers: Mapping[str, I64]) -> dict[str, I64]:
        """Keys of row numbers."""
        return {name: self.keys[name][chosen] for name, chosen in numbers.items()}

    def trained(self) -> dict[str, I64]:
        """Numbers of all rows that occur in the training period; the others stay zero and need no place."""
        numbers = {name: np.arange(keys.size, dtype=np.int64) for name, keys in self.keys.items()}
        numbers["category"] = np.flatnonzero(self.tables.has_category_row)
        numbers["user_attribute"] = np.flatnonzero(self.tables.has_attribute_row)
        return numbers


class WorkingSet(Tables):
    """`numbers` i64[n] ascending and `rows` f32[n, dim] of each table, as `RowIndex.touched` gives them."""

    def __init__(self, index: RowIndex, numbers: Mapping[str, I64], rows: Mapping[str, F32]) -> None:
        nn.Module.__init__(self)
        whole = index.tables
        self.schema = whole.schema
        self.sparse = []
        self._n_items = index.keys["item"].size
        for name in TABLE_IDS:
            setattr(self, name, nn.Parameter(torch.from_numpy(rows[name])))
        self._chosen = {name: torch.from_numpy(chosen) for name, chosen in numbers.items()}
        for attribute, table in (
            ("item_row", "item"),
            ("user_row", "user"),
            ("bucket_row", "user_bucket"),
            ("item_categories", "category"),
            ("user_attributes", "user_attribute"),
        ):
            setattr(self, attribute, _Renumbered(getattr(whole, attribute), self._chosen[table]))
        self.item_category_weights = whole.item_category_weights
        self.user_attribute_weights = whole.user_attribute_weights

    @property
    def n_items(self) -> int:
        """Items with a row, here or not."""
        return self._n_items

    def localised(self, batch: Batch) -> Tensor | None:
        """The batch's recall sample in the numbers of this set."""
        sample = batch.recall_sample
        return None if sample is None else torch.searchsorted(self._chosen["item"], sample)

    def rows(self) -> dict[str, nn.Parameter]:
        """The leaves that gradients are wanted of, by table."""
        return {name: getattr(self, name) for name in TABLE_IDS}


class _Renumbered:
    """An index of row numbers, read as positions in `chosen`; what is padding may become any position."""

    def __init__(self, whole: Tensor, chosen: Tensor) -> None:
        self._whole = whole
        self._chosen = chosen

    def __getitem__(self, which: Tensor) -> Tensor:
        found = torch.searchsorted(self._chosen, self._whole[which])
        return found.clamp(max=max(0, self._chosen.numel() - 1))


def _present(numbers: Tensor, weights: Tensor, which: Tensor) -> Tensor:
    """Row numbers that are no padding, i64[m]."""
    of_which = numbers[which]
    return of_which[weights[which] > 0]
