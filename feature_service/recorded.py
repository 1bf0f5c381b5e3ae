"""A recorded request as model inputs, from the tables of its release instead of shards and Redis.

The same functions of `feature_service.schema` that serving calls, so that offline scores and served scores can be
compared number by number. Refuses nothing: what has no row gets the table's default row, as in serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, bucket_of, key_of, keys_of
from feature_service.schema import (
    CANDIDATE_GAP,
    FeatureSchema,
    ModelInputs,
    assemble,
    gap_indices,
    gap_keys,
    pool_categories,
    schema_of,
    user_vector,
)
from infra.release import RecordedRequest, Release, TableRows

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]


class RecordedFeatures:
    """Assembles requests from `tables`; `categories` are those of each item id."""

    def __init__(
        self, schema: FeatureSchema, tables: Mapping[str, TableRows], categories: Mapping[str, Sequence[str]]
    ) -> None:
        self._schema = schema
        self._rows_of = {name: np.concatenate((t.rows, t.default_row[None])) for name, t in tables.items()}
        self._positions = {name: {k: i for i, k in enumerate(t.keys.tolist())} for name, t in tables.items()}
        self._categories = categories

    def inputs(self, request: RecordedRequest) -> ModelInputs:
        """Model inputs of the request; of a longer history the newest `max_history` items count."""
        newest = slice(-self._schema.max_history, None)
        history = request.history_items[newest]
        ts_us = np.array(request.history_ts_us[newest], np.int64)
        gaps = self._rows("gap", gap_keys(self._schema))[0]
        return assemble(
            self._schema,
            user=self._user(request),
            history_items=self._rows("item", keys_of(ITEM, history))[0],
            history_categories=self._pooled(history),
            history_gaps=gaps[gap_indices(self._schema, ts_us)],
            target_items=self._rows("item", keys_of(ITEM, request.candidates))[0],
            target_categories=self._pooled(request.candidates),
            target_gap=gaps[CANDIDATE_GAP],
        )

    def _user(self, request: RecordedRequest) -> F32:
        own, found = self._rows("user", np.array([key_of(USER, request.user_id)], np.int64))
        bucket = np.array([bucket_of(request.user_id, self._schema.n_user_buckets)], np.int64)
        attributes = keys_of(ATTRIBUTE, (f"{name}={value}" for name, value in request.attributes.items()))
        return user_vector(
            own[0], bool(found[0]), self._rows("user_bucket", bucket)[0][0], self._rows("user_attribute", attributes)[0]
        )

    def _pooled(self, items: Sequence[str]) -> F32:
        """Mean category rows f32[M, category_dim]."""
        of_items = [self._categories.get(item, ()) for item in items]
        names = sorted({name for categories in of_items for name in categories})
        column = {name: i for i, name in enumerate(names)}
        weights = np.zeros((len(items), len(names)), np.float32)
        for row, categories in enumerate(of_items):
            for name in categories:
                weights[row, column[name]] = 1 / len(categories)
        return pool_categories(self._rows("category", keys_of(CATEGORY, names))[0], weights)

    def _rows(self, table: str, keys: I64) -> tuple[F32, BOOL]:
        """Rows f32[n, dim], the default where there is none, and whether there is one."""
        positions = self._positions[table]
        found = np.fromiter((positions.get(key, -1) for key in keys.tolist()), np.int64, keys.size)
        return self._rows_of[table][found], found >= 0


def recorded_features(release: Release) -> RecordedFeatures:
    """For the requests of one release. Raises ReleaseRefused when its schema means something else to this code."""
    return RecordedFeatures(
        schema_of(release.manifest.schema, release.manifest.schema_fingerprint),
        {table.name: release.table(table.name) for table in release.manifest.tables},
        {item.item_id: item.categories for item in release.catalogue()},
    )
