"""The recorded requests of a release as model inputs, assembled from its own tables.

What serving assembles from shards and Redis is assembled here from files, with the same functions of the schema: a
replica checks its engine with it before it serves. Refuses nothing; what has no row gets the table's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, bucket_of, key_of, keys_of
from feature_service.schema import (
    CANDIDATE_GAP,
    TABLE_IDS,
    FeatureSchema,
    ModelInputs,
    assemble,
    gap_indices,
    gap_keys,
    pool_categories,
    user_vector,
)
from infra.release import RecordedRequest, Release, TableRows

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """One recorded request: inputs and the logits f32[N] that the trained models gave."""

    inputs: ModelInputs
    edge_logits: F32
    rerank_logits: F32


def recorded_inputs(release: Release, schema: FeatureSchema) -> list[RecordedInputs]:
    """Every recorded request of a release."""
    source = _Tables(release)
    return [
        RecordedInputs(
            source.inputs(schema, request),
            np.asarray(request.edge_logits, np.float32),
            np.asarray(request.rerank_logits, np.float32),
        )
        for request in release.requests()
    ]


class _Tables:
    def __init__(self, release: Release) -> None:
        self._tables = {name: _Lookup(release.table(name)) for name in TABLE_IDS}
        self._categories = {item.item_id: item.categories for item in release.catalogue()}

    def inputs(self, schema: FeatureSchema, request: RecordedRequest) -> ModelInputs:
        own, found = self._rows("user", np.array([key_of(USER, request.user_id)], np.int64))
        bucket = self._rows("user_bucket", np.array([bucket_of(request.user_id, schema.n_user_buckets)], np.int64))[0]
        named = (f"{name}={value}" for name, value in request.attributes.items())
        attributes = self._rows("user_attribute", keys_of(ATTRIBUTE, named))[0]
        gaps = self._rows("gap", gap_keys(schema))[0]
        ts_us = np.asarray(request.history_ts_us, np.int64)
        return assemble(
            schema,
            user=user_vector(own[0], bool(found[0]), bucket[0], attributes),
            history_items=self._rows("item", keys_of(ITEM, request.history_items))[0],
            history_categories=self._pooled(request.history_items),
            history_gaps=gaps[gap_indices(schema, ts_us)],
            target_items=self._rows("item", keys_of(ITEM, request.candidates))[0],
            target_categories=self._pooled(request.candidates),
            target_gap=gaps[CANDIDATE_GAP],
        )

    def _rows(self, table: str, keys: I64) -> tuple[F32, NDArray[np.bool_]]:
        return self._tables[table].rows(keys)

    def _pooled(self, item_ids: Sequence[str]) -> F32:
        named = [self._categories.get(item_id, []) for item_id in item_ids]
        distinct = {name: column for column, name in enumerate(dict.fromkeys(c for names in named for c in names))}
        weights = np.zeros((len(named), len(distinct)), np.float32)
        for row, names in enumerate(named):
            for name in names:
                weights[row, distinct[name]] = 1.0 / len(names)
        return pool_categories(self._rows("category", keys_of(CATEGORY, distinct))[0], weights)


class _Lookup:
    def __init__(self, table: TableRows) -> None:
        self._order = np.argsort(table.keys)
        self._table = table

    def rows(self, keys: I64) -> tuple[F32, NDArray[np.bool_]]:
        """Rows f32[n, dim] and found bool[n] of keys i64[n]."""
        table = self._table
        if table.keys.size == 0:
            found = np.zeros(keys.size, np.bool_)
            return np.tile(table.default_row, (keys.size, 1)), found
        at = np.searchsorted(table.keys, keys, sorter=self._order)
        at = self._order[np.minimum(at, table.keys.size - 1)]
        found = table.keys[at] == keys
        return np.where(found[:, None], table.rows[at], table.default_row), found
