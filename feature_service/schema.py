"""Every feature, defined once: used by training, by the release's offline scorer and by serving.

Pure numpy over values; no I/O, no clock. What is computed here is fingerprinted, the fingerprint is written into
the release at training and compared at load: a release made with another schema is refused.

A token (history item or candidate) is `item row | mean of its category rows | row of its gap`. The gap of a history
item is its age relative to the newest item of that history, not to the request: a history then means the same
whenever it is ranked, and a log of 1998 can be served in any later year. Candidates have gap 0.
The user vector is the user's own row, or the row of his bucket when he has none, plus the mean of his attribute rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import HASH_NAME
from infra.errors import ReleaseRefused

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

TABLE_IDS = {"user": 1, "user_bucket": 2, "user_attribute": 3, "item": 4, "category": 5, "gap": 6}
CANDIDATE_GAP = 0
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class FeatureSchema:
    """The numbers that fix the meaning of every model input."""

    n_user_buckets: int
    user_dim: int = 32
    item_dim: int = 32
    category_dim: int = 16
    gap_dim: int = 16
    max_history: int = 50
    gap_bounds_s: tuple[float, ...] = (1.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0, 2592000.0)
    history_events: tuple[str, ...] = ("click", "rating", "like", "purchase", "play")
    hash_name: str = HASH_NAME
    version: int = SCHEMA_VERSION

    @property
    def token_dim(self) -> int:
        """Width of one history or candidate token."""
        return self.item_dim + self.category_dim + self.gap_dim

    @property
    def n_gaps(self) -> int:
        """Rows of the `gap` table: one for candidates, one per interval."""
        return len(self.gap_bounds_s) + 2

    def table_dim(self, table: str) -> int:
        """Row width of one table."""
        return {
            "user": self.user_dim,
            "user_bucket": self.user_dim,
            "user_attribute": self.user_dim,
            "item": self.item_dim,
            "category": self.category_dim,
            "gap": self.gap_dim,
        }[table]

    def fingerprint(self) -> str:
        """Hex digest that changes with any field."""
        return hashlib.sha256(msgspec.json.encode(asdict(self), order="sorted")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What both rankers take for one request: L history tokens, N candidates, oldest history item first.

    `hist` f32[L, token_dim], `target` f32[N, token_dim], `mask` f32[L] (1 where a history token is real),
    `user` f32[user_dim]. L is at least 1: an empty history is one masked token of zeros.
    """

    hist: F32
    target: F32
    mask: F32
    user: F32

    def only(self, chosen: I64) -> ModelInputs:
        """The same request with the chosen candidates, in that order."""
        return ModelInputs(self.hist, self.target[chosen], self.mask, self.user)


def gap_indices(schema: FeatureSchema, ts_us: I64) -> I64:
    """Gap of each history item, int64[L] in [1, n_gaps): its age relative to the newest one."""
    if ts_us.size == 0:
        return np.empty(0, np.int64)
    age_s = (ts_us.max() - ts_us) / 1e6
    gaps: I64 = np.searchsorted(np.asarray(schema.gap_bounds_s), age_s, side="right").astype(np.int64)
    return gaps + 1


def gap_keys(schema: FeatureSchema) -> I64:
    """Keys of the `gap` table: the gap itself, int64[n_gaps]."""
    return np.arange(schema.n_gaps, dtype=np.int64)


def user_vector(own: F32, own_found: bool, bucket: F32, attributes: F32) -> F32:
    """User input f32[user_dim] from own row [U], bucket row [U] and attribute rows [A, U]."""
    base = own if own_found else bucket
    return base if attributes.shape[0] == 0 else base + attributes.mean(axis=0, dtype=np.float32)


def recall_query(user: F32, history_items: F32) -> F32:
    """Query f32[item_dim] for the dot-product recall: the user vector plus the mean history row [L, item_dim]."""
    return user if history_items.shape[0] == 0 else user + history_items.mean(axis=0, dtype=np.float32)


def pool_categories(category_rows: F32, weights: F32) -> F32:
    """Mean category row per item: weights f32[M, C] (rows sum to 1, or 0 for none) times category_rows [C, dim]."""
    return weights @ category_rows


def assemble(
    schema: FeatureSchema,
    *,
    user: F32,
    history_items: F32,
    history_categories: F32,
    history_gaps: F32,
    target_items: F32,
    target_categories: F32,
    target_gap: F32,
) -> ModelInputs:
    """Concatenate rows into tokens.

    history_*: f32[L, dim of that table], oldest first; target_items [N, item_dim], target_categories
    [N, category_dim], target_gap [gap_dim] (the row of gap 0, the same for every candidate).
    """
    n = target_items.shape[0]
    target = np.empty((n, schema.token_dim), np.float32)
    split = schema.item_dim + schema.category_dim
    target[:, : schema.item_dim] = target_items
    target[:, schema.item_dim : split] = target_categories
    target[:, split:] = target_gap
    length = history_items.shape[0]
    if length == 0:
        return ModelInputs(np.zeros((1, schema.token_dim), np.float32), target, np.zeros(1, np.float32), user)
    hist = np.concatenate((history_items, history_categories, history_gaps), axis=1)
    return ModelInputs(hist, target, np.ones(length, np.float32), user)


def schema_of(fields: Mapping[str, Any], fingerprint: str) -> FeatureSchema:
    """The schema a release was made with. Raises ReleaseRefused when this code means something else by it."""
    try:
        schema = msgspec.convert(dict(fields), FeatureSchema)
    except msgspec.ValidationError as error:
        raise ReleaseRefused(f"feature schema: {error}; it was made by another version of Trirank") from error
    if unknown := fields.keys() - asdict(schema).keys():
        raise ReleaseRefused(f"feature schema: unknown field {sorted(unknown)[0]}")
    if schema.hash_name != HASH_NAME or schema.version != SCHEMA_VERSION:
        raise ReleaseRefused(
            f"feature schema: version {schema.version} with {schema.hash_name}; "
            f"this code serves version {SCHEMA_VERSION} with {HASH_NAME}"
        )
    if schema.fingerprint() != fingerprint:
        raise ReleaseRefused(f"feature schema: fingerprint {schema.fingerprint()} is not the release's {fingerprint}")
    return schema
