"""Triton: keys that landed far from home come home, and a key that can move takes one step.

A bucket holds eight; at a load of 0.9 one key in eight finds its home full, and one in twenty its second bucket too.
Such a key looks for a word in its home bucket that is itself at home and whose second bucket has room: that one moves,
and the far key takes its lane. Nearly every word is then at home or one step from it; lookups read fewer buckets. What
the far key leaves behind is a hole: no key, but no end of a search either, and free for new keys.

Runs alone on the stream. Who moves a word first swaps it for MOVING, so no two programs move the same one.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import (
    HOLE,
    HOP_SHIFT,
    LANES,
    MARK_STRIDE,
    MOVING,
    ONE_HOP,
    STATE_SHIFT,
    any_of,
    home_of,
    mix,
    next_bucket,
)
from param_server.table.kernels_claim import SLOT_BITS, STALE, look, swap

_NO_HOP = tl.constexpr(~(255 << 54))


@triton.jit
def _move(source, target, records, rows, scales, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr):
    """Copy row, record and scale from slot to slot."""
    column = tl.arange(0, BLOCK_D)
    in_row = mask[:, None] & (column < D)[None, :]
    tile = tl.load(rows + source[:, None] * D + column[None, :], mask=in_row, other=0)
    tl.store(rows + target[:, None] * D + column[None, :], tile, mask=in_row)
    pair = tl.arange(0, 2)[None, :]
    record = tl.load(records + source[:, None] * 2 + pair, mask=mask[:, None], other=0)
    tl.store(records + target[:, None] * 2 + pair, record, mask=mask[:, None])
    if SCALED:
        tl.store(scales + target, tl.load(scales + source, mask=mask, other=0), mask=mask)


@triton.jit
def _displace(words, home, pending, n_buckets, K: tl.constexpr):
    """Slot that each of the pending may take in his home bucket (or -1), and the slot where its word goes.

    The lane is locked, and the word is already at its new place.
    """
    slot = tl.full([K], -1, tl.int64)
    target = tl.full([K], -1, tl.int64)
    lane = 0
    while any_of(pending) & (lane < LANES):
        place = home * LANES + lane
        word = tl.load(words + place, mask=pending, other=0, cache_modifier=".cg")
        settled = ((word >> STATE_SHIFT) & 3) != 0
        try_it = pending & settled & (((word >> HOP_SHIFT) & 255) == 0)
        low = (word & 0xFFFFFFFF).to(tl.uint64, bitcast=True)
        step = 1 + ((low * (n_buckets - 1).to(tl.uint64)) >> 32).to(tl.int64)
        second = next_bucket(home, step, n_buckets)
        _, free, held = look(words, second, word, try_it, K)
        try_it = try_it & (free < LANES)
        here = home * 0 + lane
        locked = try_it & (swap(words, home, here, word, word * 0 + MOVING, try_it) == word)
        moved = locked & (swap(words, second, free, held, word + ONE_HOP, locked) == held)
        # Somebody else took the place: unlock.
        tl.store(words + place, word, mask=locked & (moved == 0))
        slot = tl.where(moved, place, slot)
        target = tl.where(moved, second * LANES + free, target)
        pending = pending & (moved == 0)
        lane += 1
    return slot, target


@triton.jit(do_not_specialize=["n", "n_buckets", "first_mark"], do_not_specialize_on_alignment=["keys_at", "slots_at"])
def tidy_kernel(
    keys_at, slots_at, words, records, marks, rows, scales, n, n_buckets, first_mark,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Bring home what a batch has just inserted two steps from home or farther."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    code = tl.load(slots_at + at, mask=at < n, other=STALE)
    slot = code & SLOT_BITS
    # Of the positions of one key the winner acts, and only he.
    mark = tl.load(marks + slot * MARK_STRIDE, mask=code >= 0, other=-1)
    wins = (code >= 0) & (mark == first_mark + at.to(tl.int32))
    word = tl.load(words + slot, mask=wins, other=0)
    far = wins & (((word >> HOP_SHIFT) & 255) >= 2)
    if any_of(far):
        home = home_of(mix(tl.load(keys_at + at, mask=far, other=0)), n_buckets.to(tl.int64))
        place, target = _displace(words, home, far, n_buckets.to(tl.int64), K)
        moves = far & (place >= 0)
        _move(place, target, records, rows, scales, moves, D, BLOCK_D, SCALED)
        tl.debug_barrier()  # other threads of the program write where these have read
        _move(slot, place, records, rows, scales, moves, D, BLOCK_D, SCALED)
        tl.store(words + place, word & _NO_HOP, mask=moves)
        tl.store(words + slot, tl.full([K], HOLE, tl.int64), mask=moves)
