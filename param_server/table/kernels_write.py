"""Triton: the rows of a batch enter the table, for assign and delete.

Positions of a batch compete for the slot of their key: the greatest mark wins. Marks grow with the position and from
batch to batch, so nothing has to be cleared; the caller brings the batch in ascending order of version, so the last
position of a key is the one that counts. `write_kernel` does everything in one pass as if no key came twice, and counts
those that did; if there were any, `settle_kernel` writes the winners once more. No lookup runs between the two.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import FRESH, LIVE, LIVE_BITS, MARK_STRIDE, TOMBSTONE, TOMBSTONE_BITS, VERSION_STRIDE
from param_server.table.kernels_claim import (
    APPLIED,
    CODE_SHIFT,
    DOUBLED,
    LIVE_CHANGE,
    REFUSED,
    SLOT_BITS,
    SPREAD,
    STALE,
    code_of,
    count,
    count_doubled,
    locate,
)

_ALL_BUT_STATE = tl.constexpr((1 << 62) - 1)


@triton.jit
def given_rows(at, mask, source_at, rows_at, D: tl.constexpr, BLOCK_D: tl.constexpr, ORDERED: tl.constexpr):
    """The rows f32[K, BLOCK_D] that the batch brings for some positions."""
    source = at if ORDERED else tl.load(source_at + at, mask=mask, other=0)
    column = tl.arange(0, BLOCK_D)
    in_row = mask[:, None] & (column < D)[None, :]
    return tl.load(rows_at + source[:, None] * D + column[None, :], mask=in_row, other=0).to(tl.float32)


@triton.jit
def put_rows(tile, rows, scales, slot, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr):
    """Store f32 rows in the type of the table. What is too large for it becomes the largest that is not."""
    kind = rows.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    if SCALED:
        largest = tl.max(tl.abs(tile), 1)
        scale = tl.where(largest > 0, largest / 127.0, 1.0)
        tl.store(scales + slot, scale, mask=mask)
        tile = tile / scale[:, None]
        tile = tl.where(tile < 0, tile - 0.5, tile + 0.5)
    elif kind == tl.float16:
        tile = tl.minimum(tl.maximum(tile, -65504.0), 65504.0)
    elif kind == tl.bfloat16:
        tile = tl.minimum(tl.maximum(tile, -3.3895313892515355e38), 3.3895313892515355e38)
    tl.store(rows + slot[:, None] * D + column[None, :], tile.to(kind), mask=mask[:, None] & (column < D)[None, :])


@triton.jit
def set_state(words, slot, bits: tl.constexpr, mask):
    """Give words another state."""
    word = tl.load(words + slot, mask=mask, other=0, cache_modifier=".cg")
    tl.store(words + slot, (word & _ALL_BUT_STATE) | bits, mask=mask)


@triton.jit
def _compete(slot, state, version, mark, records, marks, first_mark, K: tl.constexpr):
    """Who may write (newer than what the table held), who is the greatest so far, and who is the first at his slot.

    A record is read as one: version and mark belong together. A slot that this batch has written is fought for by mark
    alone; the version there now is that of a position of this batch.
    """
    pair = tl.arange(0, 2)[None, :]
    record = tl.load(records + slot[:, None] * 2 + pair, mask=(slot >= 0)[:, None], other=0, cache_modifier=".cg")
    stored = tl.sum(tl.where(pair == 0, record, 0), 1)
    last = tl.sum(tl.where(pair == 1, record, 0), 1).to(tl.int32)
    newer = version.to(tl.uint64, bitcast=True) > stored.to(tl.uint64, bitcast=True)
    entered = (slot >= 0) & ((state == FRESH) | (last >= first_mark) | newer)
    before = tl.atomic_max(marks + slot * MARK_STRIDE, mark, mask=entered, sem="relaxed")
    return entered, entered & (before < mark), entered & (before < first_mark)


@triton.jit
def put_all(
    at, slot, wins, versions_at, source_at, rows_at, scores_at, records, scores, rows, scales,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DELETE: tl.constexpr, SCALED: tl.constexpr,
    SCORED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Write version, score and row where `wins`; a delete leaves the row."""
    version = tl.load(versions_at + at, mask=wins, other=0)
    tl.store(records + slot * VERSION_STRIDE, version, mask=wins)
    if SCORED:
        tl.store(scores + slot * MARK_STRIDE, tl.load(scores_at + at, mask=wins, other=0), mask=wins)
    if not DELETE:
        tile = given_rows(at, wins, source_at, rows_at, D, BLOCK_D, ORDERED)
        put_rows(tile, rows, scales, slot, wins, D, BLOCK_D, SCALED)


@triton.jit
def put_state(words, slot, state, wins, DELETE: tl.constexpr):
    """Write the state where it changes: last of all, when the mark is there for others to see."""
    if DELETE:
        set_state(words, slot, TOMBSTONE_BITS, wins & (state != TOMBSTONE))
    else:
        set_state(words, slot, LIVE_BITS, wins & (state != LIVE))


@triton.jit(
    do_not_specialize=["n", "n_buckets", "first_mark", "stamp"],
    do_not_specialize_on_alignment=["keys_at", "versions_at", "source_at", "scores_at", "allowed_at", "slots_at"],
)
def write_kernel(
    keys_at, versions_at, source_at, rows_at, scores_at, allowed_at, slots_at,
    words, records, marks, scores, stamps, rows, scales, counters, n, n_buckets, first_mark, stamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, INSERT: tl.constexpr,
    CHAIN: tl.constexpr, GATED: tl.constexpr, DELETE: tl.constexpr, SCALED: tl.constexpr, SCORED: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Assign rows_at[source, D] (rows_at[position] when ORDERED) or delete, stamp what changes, fill slots i64[n]."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    key = tl.load(keys_at + at, mask=inside, other=0)
    version = tl.load(versions_at + at, mask=inside, other=0)
    allowed = inside
    if GATED:
        allowed = inside & (tl.load(allowed_at + at, mask=inside, other=0) != 0)
    slot, state = locate(words, key, inside, allowed, n_buckets.to(tl.int64), counters, K, INSERT, CHAIN)
    mark = first_mark + at.to(tl.int32)
    entered, ahead, first = _compete(slot, state, version, mark, records, marks, first_mark, K)
    put_all(
        at, slot, ahead, versions_at, source_at, rows_at, scores_at, records, scores, rows, scales,
        D, BLOCK_D, DELETE, SCALED, SCORED, ORDERED,
    )  # fmt: skip
    put_state(words, slot, state, ahead, DELETE)
    tl.store(stamps + slot * STRIDE, tl.full([K], 0, tl.int32) + stamp, mask=entered)
    code = code_of(slot, state, entered, INSERT)
    tl.store(slots_at + at, code, mask=inside)
    was_live = tl.sum((first & (state == LIVE)).to(tl.int32), 0)
    firsts = tl.sum(first.to(tl.int32), 0)
    count(counters, APPLIED, firsts)
    count(counters, LIVE_CHANGE, (0 if DELETE else firsts) - was_live)
    count(counters, REFUSED, tl.sum((inside & (code < STALE)).to(tl.int32), 0))
    count_doubled(counters, tl.sum(entered.to(tl.int32), 0) - firsts)


@triton.jit(
    do_not_specialize=["n", "first_mark"],
    do_not_specialize_on_alignment=["slots_at", "versions_at", "source_at", "scores_at"],
)
def settle_kernel(
    slots_at, versions_at, source_at, rows_at, scores_at, words, records, marks, scores, rows, scales, counters,
    n, first_mark,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, DELETE: tl.constexpr,
    SCALED: tl.constexpr, SCORED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Write every winner again if a key came twice; nothing to do otherwise."""
    if tl.load(counters + DOUBLED * SPREAD) != 0:
        at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
        code = tl.load(slots_at + at, mask=at < n, other=STALE)
        slot = code & SLOT_BITS
        mark = tl.load(marks + slot * MARK_STRIDE, mask=code >= 0, other=-1)
        wins = (code >= 0) & (mark == first_mark + at.to(tl.int32))
        put_all(
            at, slot, wins, versions_at, source_at, rows_at, scores_at, records, scores, rows, scales,
            D, BLOCK_D, DELETE, SCALED, SCORED, ORDERED,
        )  # fmt: skip
        put_state(words, slot, (code >> CODE_SHIFT).to(tl.int32), wins, DELETE)
