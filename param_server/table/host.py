"""What tables in host memory have in common: array layouts of the compiled loops, the lookup, the recall.

The loops of `kernels_cpu.py` are compiled for one memory layout; what comes from the wire is read-only or strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32, I64, U64, Op
from param_server.table import Bool, RowBatch, TopK, kernels_recall
from param_server.table import kernels_cpu as kernels

NO_KEYS = np.empty(0, np.int64)


class Index(NamedTuple):
    """Cells u64 of the index, and by entry: keys i64, states u8, rows f32[entries, dim]."""

    slots: U64
    keys: I64
    states: NDArray[np.uint8]
    rows: F32


def look_up(index: Index, keys: I64, default_row: F32) -> tuple[F32, Bool]:
    """Rows f32[n, dim] and found bool[n] for keys i64[n]; a missing key has the default row."""
    rows = np.empty((keys.size, index.rows.shape[1]), np.float32)
    found = np.empty(keys.size, np.bool_)
    kernels.lookup(*index, plain(keys), default_row, rows, found)
    return rows, found


def best_rows(index: Index, used: int, queries: F32, k: int, exclude: Sequence[I64]) -> list[TopK]:
    """`EmbeddingTable.topk` over the first `used` entries.

    One product per query, not one for all: the answer to a query must not depend on which others came with it.
    """
    if exclude and len(exclude) != len(queries):
        raise ValueError(f"{len(exclude)} exclusions for {len(queries)} queries")
    return [_best(index, used, query, k, exclude[i] if exclude else NO_KEYS) for i, query in enumerate(queries)]


def _best(index: Index, used: int, query: F32, k: int, exclude: I64) -> TopK:
    # A row or query of huge numbers may overflow: such a score is infinite and never wins.
    with np.errstate(all="ignore"):
        scores = index.rows[:used] @ query
    ranks = np.empty(used, np.uint64)
    count = kernels_recall.rank(scores, index.slots, index.keys, index.states, used, plain(exclude), ranks)
    ranks = ranks[:count]
    k = min(max(k, 0), count)
    if 0 < k < count:
        ranks.partition(k - 1)
    ranks[:k].sort()
    best = kernels_recall.settle(ranks[:k], ranks[k:], index.slots, index.keys)
    return TopK(index.keys[best], scores[best], index.rows[best])


def check_batch(batch: RowBatch, dim: int) -> None:
    """Raises ValueError when the arrays of a batch do not fit each other or a table of this dim."""
    n = batch.keys.size
    if batch.rows.shape != (0 if batch.op is Op.DELETE else n, dim) or batch.versions.size != n:
        raise ValueError(f"{n} keys, {batch.versions.size} versions, rows {batch.rows.shape}, dim {dim}")


def plain(keys: I64) -> I64:
    """Keys in the layout the loops are compiled for."""
    return np.array(keys, np.int64, order="C")


def plain_rows(rows: F32) -> F32:
    """The same for rows."""
    return np.require(rows, np.float32, ["C", "A", "W"])


def as_is(array: np.ndarray[Any, Any]) -> Any:
    """The same for any array; copied only where it has another layout."""
    return np.require(array, None, ["C", "A", "W"])
