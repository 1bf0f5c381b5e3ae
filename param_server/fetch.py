"""The answers to `fetch`: rows of several tables and, if asked for, a recall over one of them.

Pure over a generation. Arguments and tensors are those of `client.py`; what does not fit is refused with Permanent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.errors import Permanent, TrirankError
from infra.wire.messages import Request
from param_server import metrics
from param_server.contract import F32, I64
from param_server.generation import Generation
from param_server.table import Bool, EmbeddingTable, TopK

_NO_KEYS = np.empty(0, np.int64)
_NO_ROWS = np.empty((0, 0), np.float32)
_NONE_FOUND = np.empty(0, np.bool_)
_FOUND = metrics.LOOKUP_ROWS.labels("yes")
_MISSING = metrics.LOOKUP_ROWS.labels("missing")

Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One fetch whose arguments fit: its generation, the tables of its lookups and their keys."""

    request: Request
    generation: Generation
    tables: list[str]
    keys: list[I64]


def fetch_tensors(generations: Mapping[int, Generation], request: Request) -> Tensors:
    """Return `r{i}` f32[n, dim], `f{i}` u8[n] per lookup, and `tk_keys`, `tk_scores`, `tk_rows`. Raises Permanent."""
    (answer,) = fetch_all(generations, [request])
    if isinstance(answer, TrirankError):
        raise answer
    return answer


def fetch_all(generations: Mapping[int, Generation], requests: Sequence[Request]) -> list[Tensors | TrirankError]:
    """`fetch_tensors` of each, or why not, in order. A table is looked up once for all of them: a device answers one
    lookup of many keys in the time of one of few."""
    asked = [_asked(generations, request) for request in requests]
    rows, found = _look_up([one for one in asked if isinstance(one, _Asked)])
    answers: list[Tensors | TrirankError] = []
    for one in asked:
        if isinstance(one, TrirankError):
            answers.append(one)
            continue
        n = len(one.tables)
        answers.append(_answer(one, rows[:n], found[:n]))
        rows, found = rows[n:], found[n:]
    return answers


def _asked(generations: Mapping[int, Generation], request: Request) -> _Asked | Permanent:
    generation = generations.get(request.args.get("generation", 0))
    if generation is None:
        return Permanent(f"fetch: generation {request.args.get('generation')} is not served here")
    tables = list(request.args.get("tables", ()))
    try:
        for name in tables:
            _table(generation, name)
        return _Asked(request, generation, tables, [_tensor(request, f"k{i}", np.int64, 1) for i in range(len(tables))])
    except Permanent as error:
        return error


def _look_up(asked: Sequence[_Asked]) -> tuple[list[F32], list[Bool]]:
    """Rows and found of every lookup, in order."""
    lookups = [(one.generation, name, keys) for one in asked for name, keys in zip(one.tables, one.keys, strict=True)]
    together: dict[tuple[int, str], list[int]] = {}
    for i, (generation, name, _) in enumerate(lookups):
        together.setdefault((generation.number, name), []).append(i)
    rows: list[F32] = [_NO_ROWS] * len(lookups)
    found: list[Bool] = [_NONE_FOUND] * len(lookups)
    for at in together.values():
        generation, name, keys = lookups[at[0]]
        table = generation.tables[name]
        if len(at) == 1:
            rows[at[0]], found[at[0]] = table.lookup(keys)
            continue
        got, have = table.lookup(np.concatenate([lookups[i][2] for i in at]))
        start = 0
        for i in at:
            end = start + lookups[i][2].size
            rows[i], found[i] = got[start:end], have[start:end]
            start = end
    return rows, found


def _answer(asked: _Asked, rows: list[F32], found: list[Bool]) -> Tensors | Permanent:
    reply: Tensors = {}
    for i in range(len(rows)):
        reply[f"r{i}"], reply[f"f{i}"] = rows[i], found[i].view(np.uint8)
    _count(found)
    if topk := asked.request.args.get("topk"):
        try:
            best = _recall(asked.generation, asked.request, topk, rows, found)
        except Permanent as error:
            return error
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
