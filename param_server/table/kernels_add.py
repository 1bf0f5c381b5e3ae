"""Triton: additions. Those to one key are made one after the other, in the order of the batch."""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import FRESH, LIVE, LIVE_BITS, VERSION_STRIDE, any_of, widen
from param_server.table.kernels_claim import APPLIED, CODE_SHIFT, LIVE_CHANGE, SLOT_BITS, STALE, count
from param_server.table.kernels_write import put_rows, set_state


@triton.jit
def _add_one(total, row, version, newest, turn, fresh, VERSIONED: tl.constexpr):
    """One addend per key: the sum so far, the newest version, which turns counted and which would overflow."""
    counts = turn
    if VERSIONED:
        newer = version.to(tl.uint64, bitcast=True) > newest.to(tl.uint64, bitcast=True)
        counts = turn & (fresh | newer)
    summed = total + row
    finite = tl.min((tl.abs(summed) < float("inf")).to(tl.int32), 1) != 0
    overflow = counts & (finite == 0)
    counts = counts & finite
    total = tl.where(counts[:, None], summed, total)
    greater = version.to(tl.uint64, bitcast=True) > newest.to(tl.uint64, bitcast=True)
    newest = tl.where(counts & greater, version, newest)
    return total, newest, counts, overflow


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["codes_at", "order_at", "versions_at", "over_at"])
def accumulate_kernel(
    codes_at, order_at, versions_at, rows_at, over_at, words, versions, rows, scales, counters, n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, VERSIONED: tl.constexpr,
):  # fmt: skip
    """Add rows_at[order[i], D] to the slot of codes[i]; equal codes are neighbours, in the order of the batch.

    The first of its neighbours does the work of all, so that sums round the same way every time. over u8[n] is set at
    positions whose sum would not be finite.
    """
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    code = tl.load(codes_at + at, mask=at < n, other=STALE)
    before = tl.load(codes_at + at - 1, mask=(at < n) & (at > 0), other=STALE)
    heads = (code >= 0) & (code != before)
    slot = code & SLOT_BITS
    state = (code >> CODE_SHIFT).to(tl.int32)
    column = tl.arange(0, BLOCK_D)
    in_row = (column < D)[None, :]
    live = heads & (state == LIVE)
    total = tl.load(rows + slot[:, None] * D + column[None, :], mask=live[:, None] & in_row, other=0)
    total = widen(total, scales, slot, live, SCALED)
    newest = tl.load(versions + slot * VERSION_STRIDE, mask=heads & (state != FRESH), other=0)
    fresh = heads & (state == FRESH)
    applied = tl.full([K], 0, tl.int32)
    ahead = at
    turn = heads
    while any_of(turn):
        position = tl.load(order_at + ahead, mask=turn, other=0)
        version = tl.load(versions_at + position, mask=turn, other=0)
        row = tl.load(rows_at + position[:, None] * D + column[None, :], mask=turn[:, None] & in_row, other=0)
        total, newest, counts, overflow = _add_one(total, row.to(tl.float32), version, newest, turn, fresh, VERSIONED)
        fresh = fresh & (counts == 0)
        applied += counts.to(tl.int32)
        tl.store(over_at + position, overflow.to(tl.uint8), mask=overflow)
        ahead += 1
        turn = turn & (tl.load(codes_at + ahead, mask=turn & (ahead < n), other=STALE) == code)
    wins = applied > 0
    put_rows(total, rows, scales, slot, wins, D, BLOCK_D, SCALED)
    tl.store(versions + slot * VERSION_STRIDE, newest, mask=wins)
    set_state(words, slot, LIVE_BITS, wins & (state != LIVE))
    count(counters, APPLIED, tl.sum(applied, 0))
    count(counters, LIVE_CHANGE, tl.sum((wins & (state != LIVE)).to(tl.int32), 0))
