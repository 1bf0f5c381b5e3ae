"""Triton: which entries changed when, and copies of those that are about to.

A stamp i32 lies at every slot: `2 * number + dirty`. `number` is that of the next capture when the entry last changed;
`dirty` says that it changed since it came from a tier below. Stamps lie `STRIDE` numbers apart: in a table that does
not evict they take the place of the scores in the records, and move with them.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import LIVE, MARK_STRIDE, STATE_SHIFT, VERSION_STRIDE, search, widen
from param_server.table.kernels_claim import SLOT_BITS, STALE


@triton.jit(
    do_not_specialize=["n", "first_mark", "stamp"], do_not_specialize_on_alignment=["codes_at", "dirty_at"]
)  # a new number must not compile anew
def stamp_kernel(
    codes_at, dirty_at, marks, stamps, n, first_mark, stamp,
    K: tl.constexpr, STRIDE: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of codes i64[n]. With GIVEN, dirty u8[n] is added, that of the position whose row is there."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    code = tl.load(codes_at + at, mask=inside, other=STALE)
    slot = code & SLOT_BITS
    here = code >= 0
    value = tl.full([K], 0, tl.int32) + stamp
    if GIVEN:
        mark = tl.load(marks + slot * MARK_STRIDE, mask=here, other=-1)
        here = here & (mark == first_mark + at.to(tl.int32))
        value = value + tl.load(dirty_at + at, mask=inside, other=0).to(tl.int32)
    tl.store(stamps + slot * STRIDE, value, mask=here)


@triton.jit
def copy_rows(
    at, slot, words_of, rows, scales, out_rows, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Rows of live slots as f32[K, D] at `at`, zeros for tombstones."""
    column = tl.arange(0, BLOCK_D)
    live = mask & (((words_of >> STATE_SHIFT) & 3) == LIVE)
    tile = tl.load(rows + slot[:, None] * D + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0)
    if SCALED:
        tile = widen(tile, scales, slot, live, SCALED)
    tl.store(
        out_rows + at[:, None] * D + column[None, :], tile.to(tl.float32), mask=mask[:, None] & (column < D)[None, :]
    )


@triton.jit(
    do_not_specialize=["n", "n_buckets", "first", "low", "high", "stamp"],
    do_not_specialize_on_alignment=["keys_at", "out_words", "out_slots", "out_versions"],
)
def save_kernel(
    keys_at, words, records, stamps, rows, scales, out_words, out_slots, out_versions, out_rows,
    n, n_buckets, first, low, high, stamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, CHAIN: tl.constexpr, SCALED: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Copy what keys i64[n] hold, where it lies at `first` or behind and has a stamp in (low, high]; words 0 elsewhere.

    What is copied is stamped anew, so that nobody copies it again. A key that comes twice may be copied twice.
    """
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    key = tl.load(keys_at + at, mask=inside, other=0)
    slot = search(words, key, inside, n_buckets.to(tl.int64), K, CHAIN, True)
    old = tl.load(stamps + slot * STRIDE, mask=slot >= 0, other=0, cache_modifier=".cg")
    mine = (slot >= first) & (old > low) & (old <= high)
    word = tl.load(words + slot, mask=mine, other=0, cache_modifier=".cg")
    tl.store(out_words + at, word, mask=inside)
    tl.store(out_slots + at, slot, mask=inside)
    tl.store(out_versions + at, tl.load(records + slot * VERSION_STRIDE, mask=mine, other=0), mask=mine)
    copy_rows(at, slot, word, rows, scales, out_rows, mine, D, BLOCK_D, SCALED)
    tl.store(stamps + slot * STRIDE, stamp | (old & 1), mask=mine)
