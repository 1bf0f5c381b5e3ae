"""Rows for one request, in one call per shard, and the model inputs made of them.

Asks the parameter server for the user's, the history's and the candidates' rows together, and for the recall when the
request brings no candidates. Refuses to invent rows: what is missing is the table's default row, and is counted.
Invariant: everything in `Found` that runs over candidates is aligned with `keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feature_service.resolver import ResolvedUser
from feature_service.schema import (
    CANDIDATE_GAP,
    FeatureSchema,
    ModelInputs,
    assemble,
    gap_indices,
    gap_keys,
    pool_categories,
    recall_query,
    user_vector,
)
from infra.deadline import Deadline
from infra.errors import TrirankError
from param_server.client import FetchResult, PoolTerm, TopkQuery
from reranker.gateway.catalogue import Catalogue
from reranker.gateway.query import Query
from reranker.gateway.schemas import UserKind

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

# Order of the lookups in every fetch; candidates come last, and only when the request brings them.
USER, BUCKET, ATTRIBUTES, HISTORY, CATEGORIES, GAPS, CANDIDATES = range(7)
TABLES = ("user", "user_bucket", "user_attribute", "item", "category", "gap", "item")
# Buckets count from 0, so this one has no row: somebody without a bucket gets the table's default.
NO_BUCKET = -1

# The same query as `combine` makes, for the shard to compute by itself when there is only one.
_POOL = (
    PoolTerm(USER, "sum", None),
    PoolTerm(BUCKET, "sum", USER),
    PoolTerm(ATTRIBUTES, "mean", None),
    PoolTerm(HISTORY, "mean", None),
)
_NO_KEYS = np.empty(0, np.int64)


class ParameterServer(Protocol):
    """What this module needs of `param_server.client.ParameterClient`."""

    async def fetch(
        self,
        *,
        generation: int,
        lookups: Sequence[tuple[str, I64]],
        topk: TopkQuery | None,
        deadline: Deadline,
        trace_id: str = "",
    ) -> FetchResult: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the shards answered to one query; None: nothing, not even in part."""

    result: FetchResult | None
    history_rows: I64
    columns: I64

    @property
    def complete(self) -> bool:
        """Whether every shard answered."""
        return self.result is not None and not self.result.missing_shards


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of one request as model inputs. Per candidate: keys i64[N], row numbers in the catalogue i64[N], whether
    an embedding row was found bool[N], and the dot product with the recall query f32[N]."""

    keys: I64
    rows: I64
    rows_found: BOOL
    recall: F32
    inputs: ModelInputs
    user: UserKind
    watermark_us: int

    def only(self, chosen: I64) -> Found:
        """The same request with the chosen candidates, in that order."""
        return replace(
            self,
            keys=self.keys[chosen],
            rows=self.rows[chosen],
            rows_found=self.rows_found[chosen],
            recall=self.recall[chosen],
            inputs=self.inputs.only(chosen),
        )


class Embeddings:
    """Fetches and assembles. `defaults` maps a table to its default row, which stands in for rows that are unusable."""

    def __init__(
        self,
        server: ParameterServer,
        schema: FeatureSchema,
        catalogue: Catalogue,
        *,
        generation: int,
        defaults: Mapping[str, F32],
        recall_k: int,
    ) -> None:
        self._server = server
        self._schema = schema
        self._catalogue = catalogue
        self._generation = generation
        self._defaults = defaults
        self._recall_k = recall_k
        self._gap_keys = gap_keys(schema)

    async def fetch(self, query: Query, user: ResolvedUser, deadline: Deadline) -> Fetched:
        """Rows of the user, his history and the candidates, given or recalled."""
        history_rows = self._catalogue.rows(user.history_keys)
        columns = self._columns(query, history_rows)
        try:
            result = await self._server.fetch(
                generation=self._generation,
                lookups=list(zip(TABLES, self._keys(query, user, columns), strict=False)),
                topk=self._topk(query),
                deadline=deadline,
                trace_id=query.trace_id,
            )
        except TrirankError:
            # Counted by the client; what it means for the answer is the caller's to say.
            return Fetched(None, history_rows, columns)
        return Fetched(result, history_rows, columns)

    def _keys(self, query: Query, user: ResolvedUser, columns: I64) -> list[I64]:
        keys = [
            _NO_KEYS if user.user_key is None else np.array([user.user_key], np.int64),
            np.array([NO_BUCKET if user.bucket is None else user.bucket], np.int64),
            user.attribute_keys,
            user.history_keys,
            self._catalogue.category_keys[columns],
            self._gap_keys,
        ]
        return keys if query.candidates is None else [*keys, query.candidate_keys]

    def _columns(self, query: Query, history_rows: I64) -> I64:
        """Categories to fetch: those of the items, or all of them while it is not known what will be recalled."""
        if query.candidates is None:
            return np.arange(self._catalogue.category_keys.size)
        given = self._catalogue.rows(query.candidate_keys)
        return self._catalogue.columns_of(np.concatenate((history_rows, given)))

    def _topk(self, query: Query) -> TopkQuery | None:
        if query.candidates is not None:
            return None
        return TopkQuery(
            table="item",
            k=max(self._recall_k, query.k),
            exclude=np.fromiter(query.excluded, np.int64, len(query.excluded)),
            pool=_POOL,
            combine=_recall_query_of,
        )

    def assemble(self, query: Query, user: ResolvedUser, fetched: Fetched) -> Found | None:
        """Model inputs of what was fetched; default rows for given candidates when nothing was; None when there is
        nothing to rank."""
        result = fetched.result or self._defaults_for(query, user, fetched)
        if result.topk is None and query.candidates is None:
            return None
        rows, found = self._usable(result)
        if result.topk is None:
            keys, items, items_found = query.candidate_keys, rows[CANDIDATES], found[CANDIDATES]
        else:
            keys, items = result.topk.keys, result.topk.rows
            items_found = np.ones(keys.size, np.bool_)
        history_rows, columns = fetched.history_rows, fetched.columns
        n_history = history_rows.size
        candidate_rows = self._catalogue.rows(keys)
        item_rows = np.concatenate((history_rows, candidate_rows))
        pooled = pool_categories(rows[CATEGORIES], self._catalogue.category_weights(item_rows, columns))
        vector = _user_vector_of(rows, found)
        inputs = assemble(
            self._schema,
            user=vector,
            history_items=rows[HISTORY],
            history_categories=pooled[:n_history],
            history_gaps=rows[GAPS][gap_indices(self._schema, user.history_ts_us)],
            target_items=items,
            target_categories=pooled[n_history:],
            target_gap=rows[GAPS][CANDIDATE_GAP],
        )
        recall = items @ recall_query(vector, rows[HISTORY])
        return Found(
            keys=keys,
            rows=candidate_rows,
            rows_found=items_found,
            recall=np.where(np.isfinite(recall), recall, -np.inf),
            inputs=inputs,
            user=_kind_of(user, found),
            watermark_us=result.watermark_us,
        )

    def _defaults_for(self, query: Query, user: ResolvedUser, fetched: Fetched) -> FetchResult:
        sizes = [keys.size for keys in self._keys(query, user, fetched.columns)]
        return FetchResult(
            rows=[np.tile(self._defaults[table], (n, 1)) for table, n in zip(TABLES, sizes, strict=False)],
            found=[np.zeros(n, np.bool_) for n in sizes],
            topk=None,
            watermark_us=0,
            missing_shards=(),
        )

    def _usable(self, result: FetchResult) -> tuple[list[F32], list[BOOL]]:
        """Rows and found flags, with the default in place of rows that are not finite."""
        rows, found = list(result.rows), list(result.found)
        for i, table in enumerate(TABLES[: len(rows)]):
            finite = np.isfinite(rows[i])
            if not finite.all():
                good = finite.min(axis=1, keepdims=True)
                rows[i] = np.where(good, rows[i], self._defaults[table])
                found[i] = found[i] & good[:, 0]
        return rows, found


def _user_vector_of(rows: Sequence[F32], found: Sequence[BOOL]) -> F32:
    own_found = bool(found[USER].any())
    own = rows[USER][0] if own_found else rows[BUCKET][0]
    return user_vector(own, own_found, rows[BUCKET][0], rows[ATTRIBUTES])


def _recall_query_of(rows: Sequence[F32], found: Sequence[BOOL]) -> F32:
    return recall_query(_user_vector_of(rows, found), rows[HISTORY])


def _kind_of(user: ResolvedUser, found: Sequence[BOOL]) -> UserKind:
    if user.user_key is None:
        return "anonymous"
    return "known" if found[USER].any() else "bucket"
