"""A release as the peers hold it: complete tokens per item and complete vectors per user, made once at start.

The peers share the product's definition of the features (`feature_service.schema`) and none of its serving code. They
may precompute what the product computes per request, because their rows do not follow a stream: a candidate's token
(item row, mean category row, row of gap 0) and a user's vector (own row plus attributes) are ready to be gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, bucket_of, key_of
from feature_service.schema import CANDIDATE_GAP, FeatureSchema, gap_indices, schema_of
from infra.release import Release, TableRows, User, read_release
from tests.bench.peers.answers import UserKind

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

RECALL_K = 500
RERANK_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Items:
    """Every item that has a row: ids, keys i64[n], tokens f32[n + 1, token_dim] (the last one is for items without a
    row), and the index of each key."""

    ids: list[str]
    keys: I64
    tokens: F32
    index_of: dict[int, int]


class PeerFeatures:
    """Everything of a release that a peer needs to make model inputs."""

    def __init__(self, path: Path) -> None:
        self.release: Release = read_release(path)
        manifest = self.release.manifest
        self.schema: FeatureSchema = schema_of(manifest.schema, manifest.schema_fingerprint)
        self.gaps = rows_of(self.release.table("gap"), np.arange(self.schema.n_gaps))
        self.items = self._load_items()
        # Row-major and contiguous: the recall is one matrix-vector product over it.
        self.item_rows = np.ascontiguousarray(self.items.tokens[:-1, : self.schema.item_dim])
        buckets = self.release.table("user_bucket")
        self._buckets = rows_of(buckets, np.arange(self.schema.n_user_buckets))
        self._no_bucket = buckets.default_row

    def user_vectors(self) -> dict[str, tuple[F32, bool]]:
        """Vector f32[user_dim] of every user of the release, and whether he has a row of his own."""
        own, attributes = self.release.table("user"), self.release.table("user_attribute")
        position = {key: i for i, key in enumerate(own.keys.tolist())}
        vectors: dict[str, tuple[F32, bool]] = {}
        for user in self.release.users():
            at = position.get(key_of(USER, user.user_id))
            base = self.bucket_vector(user.user_id) if at is None else own.rows[at]
            vectors[user.user_id] = (base + self._attributes(attributes, user), at is not None)
        return vectors

    def bucket_vector(self, user_id: str | None) -> F32:
        """Vector f32[user_dim] for a user the release does not know."""
        if user_id is None:
            return self._no_bucket
        bucket: F32 = self._buckets[bucket_of(user_id, self.schema.n_user_buckets)]
        return bucket

    def histories(self) -> dict[str, tuple[I64, I64]]:
        """(item keys, ts_us), oldest first, of the newest `max_history` events of every user."""
        found: dict[str, tuple[I64, I64]] = {}
        for user in self.release.users():
            newest = slice(-self.schema.max_history, None)
            keys = np.fromiter((key_of(ITEM, item) for item in user.history_items[newest]), np.int64)
            found[user.user_id] = (keys, np.array(user.history_ts_us[newest], np.int64))
        return found

    def indices(self, keys: I64) -> I64:
        """Index into `items.tokens` of each key i64[n]; that of the last token for items without a row."""
        find, absent = self.items.index_of.get, len(self.items.ids)
        return np.fromiter((find(key, absent) for key in keys.tolist()), np.int64, keys.size)

    def recall(self, query: F32, seen: I64) -> I64:
        """Indices of the RECALL_K items with the largest dot product, best first, without those already seen."""
        scores = self.item_rows @ query
        scores[seen[seen < scores.size]] = -np.inf
        k = min(RECALL_K, scores.size - seen.size)
        best = np.argpartition(scores, -k)[-k:]
        return best[np.argsort(-scores[best])]

    def history_tokens(self, tokens: F32, ts_us: I64) -> tuple[F32, F32]:
        """History tokens f32[L, token_dim] and mask f32[L], from the items' candidate tokens and times."""
        if tokens.shape[0] == 0:
            return np.zeros((1, self.schema.token_dim), np.float32), np.zeros(1, np.float32)
        tokens[:, -self.schema.gap_dim :] = self.gaps[gap_indices(self.schema, ts_us)]
        return tokens, np.ones(tokens.shape[0], np.float32)

    def _attributes(self, table: TableRows, user: User) -> F32:
        if not user.attributes:
            return np.zeros(self.schema.user_dim, np.float32)
        keys = np.array([key_of(ATTRIBUTE, f"{name}={value}") for name, value in user.attributes.items()], np.int64)
        mean: F32 = rows_of(table, keys).mean(axis=0, dtype=np.float32)
        return mean

    def _load_items(self) -> Items:
        table, categories = self.release.table("item"), self.release.table("category")
        position = {key: i for i, key in enumerate(table.keys.tolist())}
        catalogue = [item for item in self.release.catalogue() if item.key in position]
        tokens = np.zeros((len(catalogue) + 1, self.schema.token_dim), np.float32)
        tokens[-1, : self.schema.item_dim] = table.default_row
        split = self.schema.item_dim + self.schema.category_dim
        for i, item in enumerate(catalogue):
            names = list(dict.fromkeys(item.categories))
            keys = np.array([key_of(CATEGORY, name) for name in names], np.int64)
            tokens[i, : self.schema.item_dim] = table.rows[position[item.key]]
            tokens[i, self.schema.item_dim : split] = rows_of(categories, keys).mean(axis=0) if names else 0.0
            tokens[i, split:] = self.gaps[CANDIDATE_GAP]
        keys = np.array([item.key for item in catalogue], np.int64)
        return Items([item.item_id for item in catalogue], keys, tokens, {k: i for i, k in enumerate(keys.tolist())})


def rows_of(table: TableRows, keys: I64) -> F32:
    """Rows f32[len(keys), dim] of a table; its default row where a key has none."""
    position = {key: i for i, key in enumerate(table.keys.tolist())}
    found = [position.get(key, -1) for key in keys.tolist()]
    rows = np.concatenate((table.rows, table.default_row[None]))
    return np.asarray(rows[np.array(found, np.int64)], np.float32)


def best_first(scores: F32, k: int) -> I64:
    """Indices of the k highest scores, best first."""
    order: I64 = np.argsort(-scores, kind="stable")[:k]
    return order


def user_kind(user_id: str | None, own_row: bool) -> UserKind:
    """What the reply says of the user."""
    if user_id is None:
        return "anonymous"
    return "known" if own_row else "bucket"
