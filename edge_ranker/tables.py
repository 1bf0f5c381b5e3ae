"""The embedding tables while they are being trained, and as the release ships them.

Refuses nothing. Invariant: only what occurs in the training period gets a row; everything else is the table's default
row, in evaluation as in serving: for items and buckets the mean of all rows, for the others zeros. Buckets that no
training user fell into get the mean bucket row, since somebody new may well fall into them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from feature_service.dataset import Known
from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, bucket_of, keys_of
from feature_service.schema import CANDIDATE_GAP, TABLE_IDS, FeatureSchema
from infra.release import TableRows

I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

# Standard deviation of the rows a training begins with.
ROW_SPREAD = {"item": 0.1, "category": 0.1, "gap": 0.1, "user": 0.01, "user_bucket": 0.01, "user_attribute": 0.01}
# Beyond this many rows a dense gradient costs more than the step it is for. More than `samples.RECALL_SAMPLE`: the
# exact recall loss touches every item.
SPARSE_FROM_ROWS = 100_000
# Tables that may be so large. All others are small or take part in every batch as a whole.
SPARSE_TABLES = ("item", "user")


class Log(Protocol):
    """What tables need to know of a log: who and what it speaks of, and who and what occurs in the training period."""

    @property
    def dataset(self) -> Known: ...

    def item_counts(self) -> I64: ...

    def trained_users(self) -> BOOL: ...


class Tables(nn.Module):
    """Parameters of all tables, addressed by the row numbers of the dataset."""

    item_row: Tensor
    user_row: Tensor
    bucket_row: Tensor
    item_categories: Tensor
    item_category_weights: Tensor
    user_attributes: Tensor
    user_attribute_weights: Tensor

    def __init__(
        self,
        schema: FeatureSchema,
        log: Log,
        *,
        sparse_from_rows: int = SPARSE_FROM_ROWS,
        sparse: Collection[str] | None = None,
    ) -> None:
        """`sparse` names the tables with sparse gradients; None: those of `sparse_from_rows` rows or more."""
        super().__init__()
        data = log.dataset
        self.schema = schema
        self.trained_items: I64 = np.flatnonzero(log.item_counts())
        self.trained_users: BOOL = log.trained_users()
        self.item_names = [data.item_ids[i] for i in self.trained_items]
        self.user_names = [data.user_ids[u] for u in np.flatnonzero(self.trained_users)]
        self.buckets: I64 = np.array([bucket_of(u, schema.n_user_buckets) for u in data.user_ids], np.int64)
        self.categories = sorted({c for facts in data.facts for c in facts.categories})
        self.attributes = sorted({f"{k}={v}" for known in data.attributes for k, v in known.items()})
        self._index(data)
        self.item = _rows(self.trained_items.size, schema.item_dim, ROW_SPREAD["item"])
        self.category = _rows(len(self.categories), schema.category_dim, ROW_SPREAD["category"], self.has_category_row)
        self.gap = _rows(schema.n_gaps, schema.gap_dim, ROW_SPREAD["gap"])
        self.user = _rows(len(self.user_names), schema.user_dim, ROW_SPREAD["user"])
        self.user_bucket = _rows(schema.n_user_buckets, schema.user_dim, ROW_SPREAD["user_bucket"])
        self.user_attribute = _rows(
            len(self.attributes), schema.user_dim, ROW_SPREAD["user_attribute"], self.has_attribute_row
        )
        if sparse is None:
            sparse = [name for name in SPARSE_TABLES if getattr(self, name).shape[0] >= sparse_from_rows]
        self.sparse: list[nn.Parameter] = [getattr(self, name) for name in sparse]

    def _index(self, data: Known) -> None:
        """Where each item and user of the dataset finds its rows; one past the end means: no row."""
        item_row = np.full(len(data.item_ids), self.trained_items.size, np.int64)
        item_row[self.trained_items] = np.arange(self.trained_items.size)
        user_row = np.where(self.trained_users, np.cumsum(self.trained_users) - 1, 0)
        category_number = {name: i for i, name in enumerate(self.categories)}
        attribute_number = {name: i for i, name in enumerate(self.attributes)}
        of_items = _padded([[category_number[c] for c in facts.categories] for facts in data.facts])
        of_users = _padded([[attribute_number[f"{k}={v}"] for k, v in a.items()] for a in data.attributes])
        self.has_category_row = _occurring(of_items, self.trained_items, len(self.categories))
        self.has_attribute_row = _occurring(of_users, np.flatnonzero(self.trained_users), len(self.attributes))
        indices = {
            "item_row": torch.from_numpy(item_row),
            "user_row": torch.from_numpy(user_row),
            "bucket_row": torch.from_numpy(self.buckets),
            "item_categories": of_items[0],
            "item_category_weights": of_items[1],
            "user_attributes": of_users[0],
            "user_attribute_weights": of_users[1],
        }
        # Buffers, so that they follow the rows to another device; not part of the state, the log gives them again.
        for name, index in indices.items():
            self.register_buffer(name, index, persistent=False)

    @property
    def n_items(self) -> int:
        """Items with a row."""
        return self.item.shape[0]

    def tokens(self, items: Tensor) -> Tensor:
        """`item row | mean of its category rows` f32[M, item_dim + category_dim] of any item numbers i64[M]."""
        rows = self.item_row[items]
        if self.training:
            own = functional.embedding(rows, self.item, sparse=self.is_sparse(self.item))
        else:
            own = torch.cat((self.item, self.item.mean(dim=0, keepdim=True)))[rows]
        pooled = _pool(self.category, self.item_categories[items], self.item_category_weights[items])
        return torch.cat((own, pooled), dim=1)

    def users(self, users: Tensor, as_bucket: Tensor) -> Tensor:
        """User vectors f32[B, user_dim] of user numbers i64[B]; `as_bucket` bool[B]: the bucket, not his own row."""
        own = functional.embedding(self.user_row[users], self.user, sparse=self.is_sparse(self.user))
        bucket = functional.embedding(self.bucket_row[users], self.user_bucket)
        base = torch.where(as_bucket.unsqueeze(1), bucket, own)
        return base + _pool(self.user_attribute, self.user_attributes[users], self.user_attribute_weights[users])

    @torch.no_grad()
    def finish(self) -> None:
        """After training: give buckets without training users the mean bucket row."""
        met = torch.zeros(self.user_bucket.shape[0], dtype=torch.bool)
        met[torch.from_numpy(self.buckets[self.trained_users])] = True
        self.user_bucket[~met] = self.user_bucket[met].mean(dim=0)

    def release_tables(self) -> dict[str, tuple[int, TableRows]]:
        """Tables as the release ships them: name -> (table id, rows)."""
        category, attribute = np.flatnonzero(self.has_category_row), np.flatnonzero(self.has_attribute_row)
        keys: Mapping[str, I64] = {
            "user": keys_of(USER, self.user_names),
            "user_bucket": np.arange(self.schema.n_user_buckets, dtype=np.int64),
            "user_attribute": keys_of(ATTRIBUTE, (self.attributes[i] for i in attribute)),
            "item": keys_of(ITEM, self.item_names),
            "category": keys_of(CATEGORY, (self.categories[i] for i in category)),
            "gap": np.arange(self.schema.n_gaps, dtype=np.int64),
        }
        kept = {"category": category, "user_attribute": attribute}
        tables = {}
        for name, table_id in TABLE_IDS.items():
            rows = getattr(self, name).detach().cpu().numpy()
            rows = np.ascontiguousarray(rows[kept[name]] if name in kept else rows, np.float32)
            # Somebody anonymous has no bucket of his own: the default stands for all of them.
            mean = name in ("item", "user_bucket")
            default = rows.mean(axis=0) if mean else np.zeros(rows.shape[1], np.float32)
            versions = np.ones(rows.shape[0], np.uint64)
            tables[name] = (table_id, TableRows(keys[name], rows, versions, default))
        return tables

    def target_gap(self) -> Tensor:
        """The gap row of candidates, f32[gap_dim]."""
        return self.gap[CANDIDATE_GAP]

    def is_sparse(self, parameter: nn.Parameter) -> bool:
        return self.training and any(parameter is other for other in self.sparse)


def _rows(n: int, dim: int, spread: float, occurring: BOOL | None = None) -> nn.Parameter:
    """Random rows; those that do not occur in training are zero and, having no gradient, stay so."""
    rows = torch.randn(n, dim) * spread
    if occurring is not None:
        rows[~torch.from_numpy(occurring)] = 0.0
    return nn.Parameter(rows)


def _padded(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Numbers i64[n, widest] and mean weights f32[n, widest], 0 beyond each list."""
    widest = max((len(entry) for entry in lists), default=0)
    numbers = np.zeros((len(lists), widest), np.int64)
    weights = np.zeros((len(lists), widest), np.float32)
    for row, entry in enumerate(lists):
        numbers[row, : len(entry)] = entry
        weights[row, : len(entry)] = 1 / max(len(entry), 1)
    return torch.from_numpy(numbers), torch.from_numpy(weights)


def _occurring(padded: tuple[Tensor, Tensor], rows: I64, n: int) -> BOOL:
    numbers, weights = padded[0].numpy()[rows], padded[1].numpy()[rows]
    return np.bincount(numbers[weights > 0], minlength=n) > 0


def _pool(table: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of rows, f32[M, dim]; zeros where there are none."""
    if numbers.shape[1] == 0 or table.shape[0] == 0:
        return torch.zeros(numbers.shape[0], table.shape[1], device=table.device)
    return functional.embedding_bag(numbers, table, per_sample_weights=weights, mode="sum")
