"""The answer to one `fetch`: rows of several tables and, if asked for, a recall over one of them.

Pure over a generation. Arguments and tensors are those of `client.py`; what does not fit is refused with Permanent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infra.errors import Permanent
from infra.wire.messages import Request
from param_server import metrics
from param_server.contract import F32
from param_server.generation import Generation
from param_server.table import Bool, EmbeddingTable, TopK

_NO_KEYS = np.empty(0, np.int64)
_FOUND = metrics.LOOKUP_ROWS.labels("yes")
_MISSING = metrics.LOOKUP_ROWS.labels("missing")

Tensors = dict[str, np.ndarray[Any, Any]]


def fetch_tensors(generations: Mapping[int, Generation], request: Request) -> Tensors:
    """Return `r{i}` f32[n, dim], `f{i}` u8[n] per lookup, and `tk_keys`, `tk_scores`, `tk_rows`. Raises Permanent."""
    generation = generations.get(request.args.get("generation", 0))
    if generation is None:
        raise Permanent(f"fetch: generation {request.args.get('generation')} is not served here")
    reply: Tensors = {}
    rows: list[F32] = []
    found: list[Bool] = []
    for i, name in enumerate(request.args.get("tables", ())):
        got, have = _table(generation, name).lookup(_tensor(request, f"k{i}", np.int64, 1))
        rows.append(got)
        found.append(have)
        reply[f"r{i}"], reply[f"f{i}"] = got, have.view(np.uint8)
    _count(found)
    if topk := request.args.get("topk"):
        best = _recall(generation, request, topk, rows, found)
        reply.update(tk_keys=best.keys, tk_scores=best.scores, tk_rows=best.rows)
    return reply


def pooled_query(pool: Sequence[Sequence[Any]], rows: Sequence[F32], found: Sequence[Bool], dim: int) -> F32:
    """Return the query f32[dim] that a pool of `[lookup, "sum" | "mean", unless_found or -1]` makes of looked-up rows.

    Terms are added in order. A term is skipped when the first key of its `unless_found` was found; the lookup that is
    named there stands aside when it was not, so that exactly one of the two counts. An empty lookup adds nothing.
    """
    replaced = {unless for _, _, unless in pool if unless >= 0}
    query = np.zeros(dim, np.float32)
    for lookup, how, unless in pool:
        if not (0 <= lookup < len(rows) and unless < len(rows)) or how not in ("sum", "mean"):
            raise Permanent(f"fetch: the pool term {[lookup, how, unless]} does not fit {len(rows)} lookups")
        if rows[lookup].shape[1] != dim:
            raise Permanent(f"fetch: lookup {lookup} has rows of {rows[lookup].shape[1]}, the query needs {dim}")
        stands_aside = lookup in replaced and not found[lookup][:1].any()
        if rows[lookup].shape[0] == 0 or stands_aside or (unless >= 0 and found[unless][:1].any()):
            continue
        with np.errstate(all="ignore"):
            term = rows[lookup].sum(axis=0) if how == "sum" else rows[lookup].mean(axis=0, dtype=np.float32)
            query = query + term
    return query


def _recall(
    generation: Generation, request: Request, topk: Mapping[str, Any], rows: Sequence[F32], found: Sequence[Bool]
) -> TopK:
    table = _table(generation, topk.get("table", ""))
    k, pool = topk.get("k", 0), topk.get("pool")
    if not isinstance(k, int) or k < 1:
        raise Permanent(f"fetch: k is {k}")
    query = _tensor(request, "query", np.float32, 1) if pool is None else pooled_query(pool, rows, found, table.dim)
    if query.size != table.dim:
        raise Permanent(f"fetch: the query has {query.size} numbers, the table's rows {table.dim}")
    exclude = _tensor(request, "exclude", np.int64, 1) if "exclude" in request.tensors else _NO_KEYS
    return table.topk(query[None], k, (exclude,))[0]


def _table(generation: Generation, name: str) -> EmbeddingTable:
    table = generation.tables.get(name)
    if table is None:
        raise Permanent(f"fetch: generation {generation.number} has no table {name!r}")
    return table


def _tensor(request: Request, name: str, dtype: type, ndim: int) -> np.ndarray[Any, Any]:
    tensor = request.tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tensor.ndim != ndim:
        raise Permanent(f"fetch: tensor {name} is missing or not {np.dtype(dtype).name} of {ndim} dimensions")
    return tensor


def _count(found: Sequence[Bool]) -> None:
    n = sum(f.size for f in found)
    n_found = sum(int(np.count_nonzero(f)) for f in found)
    _FOUND.inc(n_found)
    _MISSING.inc(n - n_found)
