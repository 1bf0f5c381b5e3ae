"""Exact topk over the rows of a GPU table: which slots, their keys and scores.

Two passes (`kernels_topk.py`): the best score of every group of rows, then all scores of the groups that can matter.
The number of groups looked at twice is the number of rows wanted. Only when scores tie across the border is every score
kept, because then the order of keys decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from param_server.contract import F32, I64
from param_server.table.gpu_arrays import Arrays, keys_of
from param_server.table.gpu_host import to_device, to_host
from param_server.table.kernels_topk import best_kernel, score_kernel

QUERIES = 8
_TILE_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Best:
    """The best rows for one query, best first, equal scores in ascending order of key: i64[k], i64[k], f32[k]."""

    slots: I64
    keys: I64
    scores: F32


class Scorer:
    """The scores of at most eight queries f32[q, dim] against one table."""

    def __init__(self, arrays: Arrays, queries: F32) -> None:
        self._arrays = arrays
        self._n_queries, dim = queries.shape
        self._group = max(16, min(128, _TILE_BYTES // (_block(dim) * arrays.rows.element_size())))
        self._n_groups = triton.cdiv(arrays.n_slots, self._group)
        parts, self._unit = _split(queries, halves=arrays.rows.dtype == torch.float16)
        self._parts = to_device(parts, parts.dtype, arrays.words.device)
        self._shape = {"D": dim, "BLOCK_D": _block(dim), "T": self._group, "SCALED": arrays.scales is not None}

    def best(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots i64[q, k'] and scores f32[q, k'] in any order, and tied bool[q]: where the border cuts through equals.

        Nothing here waits for the device. A score of minus infinity means that there was nothing more. Scores are
        those of the query over its `unit`.
        """
        a = self._arrays
        tops = torch.empty((QUERIES, self._n_groups), dtype=torch.float32, device=a.words.device)
        best_kernel[(self._n_groups,)](
            a.words, a.rows, a.scales, self._parts, tops, a.n_slots, self._n_groups, **self._shape
        )
        tops = tops[: self._n_queries]
        chosen = min(count, self._n_groups)
        groups = torch.topk(tops, chosen, dim=1, sorted=False).indices
        scores = self._score(groups, 0).view(self._n_queries, -1)
        values, where = torch.topk(scores, min(count, scores.shape[1]), dim=1, sorted=False)
        slots = groups.gather(1, where // self._group) * self._group + where % self._group
        last = values.amin(1, keepdim=True)
        more = ((scores >= last).sum(1) > values.shape[1]) | ((tops >= last).sum(1) > chosen)
        return slots, values, more & (last[:, 0] > -torch.inf)

    def at_least(self, query: int, score: float) -> tuple[Tensor, Tensor]:
        """Slots i64[m] and scores f32[m] of every row that scores so much for one query."""
        groups = torch.arange(self._n_groups, device=self._arrays.words.device)
        every = self._score(groups[None, :], query).flatten()[: self._arrays.n_slots]
        slots = (every >= score).nonzero()[:, 0]
        return slots, every[slots]

    def unit(self, query: int) -> np.float32:
        """What the scores of a query have to be multiplied by: a power of two."""
        return np.float32(self._unit[query])

    def _score(self, groups: Tensor, first_query: int) -> Tensor:
        a = self._arrays
        scores = torch.empty((*groups.shape, self._group), dtype=torch.float32, device=groups.device)
        score_kernel[(groups.shape[1], groups.shape[0])](
            a.words, a.rows, a.scales, self._parts, groups, scores, a.n_slots, groups.shape[1],
            first_query, **self._shape,
        )  # fmt: skip
        return scores


def warm(arrays: Arrays, dim: int) -> None:
    """Compile what `best_rows` calls, for a table that may be empty: what is found is not looked at."""
    Scorer(arrays, np.ones((1, dim), np.float32)).best(1)
    first = torch.zeros(1, dtype=torch.int64, device=arrays.words.device)
    keys_of(arrays.words[first], first, arrays.n_buckets)


def best_rows(arrays: Arrays, queries: F32, count: int) -> list[Best]:
    """The `count` best rows, or all there are, for each query f32[q, dim]."""
    found = []
    for first in range(0, len(queries), QUERIES):
        scorer = Scorer(arrays, queries[first : first + QUERIES])
        slots, scores, tied = scorer.best(count)
        keys = keys_of(arrays.words[slots], slots, arrays.n_buckets)
        host_slots, host_keys, host_scores, host_tied = to_host([slots, keys, scores, tied])
        for i, cut in enumerate(host_tied):
            if cut:
                found.append(_all_tied(arrays, scorer, i, float(host_scores[i].min()), count))
            else:
                found.append(_ordered(host_slots[i], host_keys[i], host_scores[i], scorer.unit(i), count))
    return found


def _all_tied(arrays: Arrays, scorer: Scorer, query: int, least: float, count: int) -> Best:
    slots, scores = scorer.at_least(query, least)
    keys = keys_of(arrays.words[slots], slots, arrays.n_buckets)
    host_slots, host_keys, host_scores = to_host([slots, keys, scores])
    return _ordered(host_slots, host_keys, host_scores, scorer.unit(query), count)


def _ordered(slots: I64, keys: I64, scores: F32, unit: np.float32, count: int) -> Best:
    with np.errstate(over="ignore"):
        scores = scores * unit
    kept = np.flatnonzero(np.isfinite(scores))
    kept = kept[np.lexsort((keys[kept], -scores[kept]))[:count]]
    return Best(slots[kept], keys[kept], scores[kept])


def _block(dim: int) -> int:
    # The matrix units multiply by sixteens.
    return int(max(16, triton.next_power_of_2(dim)))


def _split(queries: F32, *, halves: bool) -> tuple[np.ndarray, F32]:
    """Parts [16, BLOCK_D] whose two halves sum to the queries over their units, and the units f32[q], powers of two.

    Two f16 hold 22 bits of a number below 1. For rows of another type than f16 the product is of f32, and the second
    half is zeros because the matrix units take queries by sixteens.
    """
    n, dim = queries.shape
    whole = np.zeros((QUERIES, _block(dim)), np.float32)
    whole[:n, :dim] = queries
    unit = np.ones(QUERIES, np.float32)
    if not halves:
        return np.concatenate([whole, np.zeros_like(whole)]), unit[:n]
    greatest = np.abs(whole).max(1)
    usable = np.isfinite(greatest) & (greatest > 0)
    unit[usable] = np.ldexp(np.float32(1), np.frexp(greatest[usable])[1])
    with np.errstate(invalid="ignore"):
        whole /= unit[:, None]
        high = whole.astype(np.float16)
        return np.concatenate([high, (whole - high).astype(np.float16)]), unit[:n]
