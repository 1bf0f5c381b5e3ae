"""Triton: scores of every row against eight queries, for an exact topk.

Slots are taken in groups of T. `best_kernel` keeps the best score of each group only; the k-th best of those bounds the
k-th best row from below, so `score_kernel` looks again at a few hundred groups of millions. Both compute a score by the
same instructions on the same tile, so a score is the same number wherever it is computed.

Queries arrive as two blocks of eight whose sum is the query, so that rows of f16 can be multiplied by the matrix units
without rounding the query to f16. A row that is not live, or has no finite score, scores minus infinity.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import LIVE, STATE_SHIFT

QUERIES = tl.constexpr(8)


@triton.jit
def _scores(
    words, rows, scales, parts_at, group, n_slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Scores f32[T, 8] of one group."""
    slot = group.to(tl.int64) * T + tl.arange(0, T)
    inside = slot < n_slots
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < D)[None, :]
    tile = tl.load(rows + slot[:, None] * D + column[None, :], mask=mask, other=0)
    query = tl.arange(0, 2 * QUERIES)
    parts = tl.load(parts_at + query[None, :] * BLOCK_D + column[:, None])
    word = tl.load(words + slot, mask=inside, other=0)
    products = tl.dot(tile.to(parts.dtype), parts, input_precision="tf32x3")
    scores = tl.sum(tl.reshape(products, (T, 2, QUERIES)), 1)
    if SCALED:
        scores = scores * tl.load(scales + slot, mask=inside, other=0.0)[:, None]
    lives = ((word >> STATE_SHIFT) & 3) == LIVE
    return tl.where(lives[:, None] & (tl.abs(scores) < float("inf")), scores, float("-inf"))


@triton.jit(do_not_specialize=["n_slots", "n_groups"])
def best_kernel(
    words, rows, scales, parts_at, best_at, n_slots, n_groups,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Best score best[8, n_groups] of each group for each query."""
    group = tl.program_id(0)
    scores = _scores(words, rows, scales, parts_at, group, n_slots, D, BLOCK_D, T, SCALED)
    query = tl.arange(0, QUERIES)
    tl.store(best_at + query.to(tl.int64) * n_groups + group, tl.max(scores, 0))


@triton.jit(do_not_specialize=["n_slots", "n_chosen", "first_query"], do_not_specialize_on_alignment=["groups_at"])
def score_kernel(
    words, rows, scales, parts_at, groups_at, scores_at, n_slots, n_chosen, first_query,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Scores scores[q, n_chosen, T] of the chosen groups i64[q, n_chosen] for query first_query + q."""
    chosen = tl.program_id(1).to(tl.int64) * n_chosen + tl.program_id(0)
    group = tl.load(groups_at + chosen)
    scores = _scores(words, rows, scales, parts_at, group, n_slots, D, BLOCK_D, T, SCALED)
    query = tl.arange(0, QUERIES)
    mine = query == first_query + tl.program_id(1)
    column = tl.max(tl.where(mine[None, :], scores, float("-inf")), 1)
    tl.store(scores_at + chosen * T + tl.arange(0, T), column)
