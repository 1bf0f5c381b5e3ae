"""Triton: rows push out others. In an evicting table a key lies in its home bucket or nowhere.

Runs after `write_kernel` of the whole batch, so a lane that the batch has written bears a mark of it and is not taken.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import (
    FRESH,
    FRESH_BITS,
    LANES,
    LIVE,
    LIVE_BITS,
    LOW_BITS,
    MARK_STRIDE,
    STATE_SHIFT,
    VERSION_STRIDE,
    any_of,
    home_of,
    is_key,
    mix,
    widen,
)
from param_server.table.kernels_claim import (
    APPLIED,
    FULL,
    INSERTED,
    LIVE_CHANGE,
    MISSING,
    REFUSED,
    STALE,
    count,
    count_doubled,
    swap,
)
from param_server.table.kernels_write import put_all

_FRESH_CODE = tl.constexpr(3 << 56)
_NO_LANE = tl.constexpr(1 << 40)
_PINNED = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _victim(words, records, bucket, wanted, most, pending, first_mark):
    """Per bucket: whether a twin brought the key in, else which lane to take (or -1), and the word there.

    An empty lane is best, then the least score below `most`. Lanes written by this batch or fresh are not for the
    taking.
    """
    lane = tl.arange(0, LANES)[None, :]
    at = bucket[:, None] * LANES + lane
    line = tl.load(words + at, mask=pending[:, None], other=0, cache_modifier=".cg")
    # The second half of a record: the score above, the mark below.
    record = tl.load(records + at * 2 + 1, mask=pending[:, None], other=0, cache_modifier=".cg")
    score = (record >> 32) & 0xFFFFFFFF
    twin = tl.max(tl.where(is_key(line, wanted[:, None]), lane, -1), 1)
    held = (record.to(tl.int32) >= first_mark) | (((line >> STATE_SHIFT) & 3) == FRESH) | (score >= most[:, None])
    rank = tl.where(line == 0, 0, (score + 1) << 3) | lane
    rank = tl.where((line != 0) & held, _NO_LANE, rank)
    least = tl.min(rank, 1)
    word = tl.sum(tl.where(rank == least[:, None], line, 0), 1)
    free = tl.where(least < _NO_LANE, (least & 7).to(tl.int32), -1)
    return twin >= 0, tl.where(twin >= 0, twin, free), word


@triton.jit
def _conquer(words, records, bucket, wanted, most, missing, first_mark, K: tl.constexpr):
    """Slot i64[K] (or -1) of each missing key, who took it himself, and the word he took it from."""
    slot = tl.full([K], -1, tl.int64)
    taken = tl.full([K], 0, tl.int64)
    made = tl.full([K], 0, tl.int32)
    pending = missing
    while any_of(pending):
        twin, lane, word = _victim(words, records, bucket, wanted, most, pending, first_mark)
        slot = tl.where(pending & twin, bucket * LANES + lane, slot)
        pending = pending & (twin == 0) & (lane >= 0)
        won = pending & (swap(words, bucket, lane, word, wanted | FRESH_BITS, pending) == word)
        slot = tl.where(won, bucket * LANES + lane, slot)
        taken = tl.where(won, word, taken)
        made += won.to(tl.int32)
        pending = pending & (slot < 0)
    return slot, made != 0, taken


@triton.jit(
    do_not_specialize=["n", "n_buckets", "first_mark"],
    do_not_specialize_on_alignment=[
        "keys_at", "versions_at", "source_at", "scores_at", "slots_at", "gone_words", "gone_slots", "gone_versions",
        "gone_scores", "gone_stamps",
    ],
)  # fmt: skip
def replace_kernel(
    keys_at, versions_at, source_at, rows_at, scores_at, slots_at, words, records, marks, scores, stamps, rows, scales,
    gone_words, gone_slots, gone_versions, gone_scores, gone_stamps, gone_rows, counters, n, n_buckets, first_mark,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, ORDERED: tl.constexpr,
    KEEP_ROWS: tl.constexpr, FORCE: tl.constexpr,
):  # fmt: skip
    """Write every MISSING position into a lane of its home bucket; what lay there goes to its position in `gone_*`.

    A pinned row stays; without FORCE, so does one whose score is not less than the new one's.

    One kernel, because what it reads of the index to find a place is still in the cache when it writes there.
    """
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    h = mix(tl.load(keys_at + at, mask=inside, other=0))
    missing = inside & (tl.load(slots_at + at, mask=inside, other=STALE) == MISSING)
    bucket = home_of(h, n_buckets.to(tl.int64))
    wanted = (h & LOW_BITS).to(tl.int64)
    most = tl.full([K], _PINNED, tl.int64)
    if not FORCE:
        most = tl.load(scores_at + at, mask=inside, other=0).to(tl.int64) & _PINNED
    slot, made, taken = _conquer(words, records, bucket, wanted, most, missing, first_mark, K)
    gone = taken != 0
    tl.store(gone_words + at, taken, mask=inside)
    tl.store(gone_slots + at, slot, mask=gone)
    tl.store(gone_versions + at, tl.load(records + slot * VERSION_STRIDE, mask=gone, other=0), mask=gone)
    tl.store(gone_scores + at, tl.load(scores + slot * MARK_STRIDE, mask=gone, other=0), mask=gone)
    tl.store(gone_stamps + at, tl.load(stamps + slot, mask=gone, other=0), mask=gone)
    was_live = gone & (((taken >> STATE_SHIFT) & 3) == LIVE)
    if KEEP_ROWS:
        column = tl.arange(0, BLOCK_D)
        mask = was_live[:, None] & (column < D)[None, :]
        tile = tl.load(rows + slot[:, None] * D + column[None, :], mask=mask, other=0)
        if SCALED:
            tile = widen(tile, scales, slot, was_live, SCALED)
        tl.store(gone_rows + at[:, None] * D + column[None, :], tile.to(gone_rows.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # other threads of the program write where these have read
    holds = slot >= 0
    mark = first_mark + at.to(tl.int32)
    before = tl.atomic_max(marks + slot * MARK_STRIDE, mark, mask=holds, sem="relaxed")
    # Who made the slot writes it, without waiting for the mark; if he has a twin, `settle_kernel` writes once more.
    put_all(
        at, slot, made, versions_at, source_at, rows_at, scores_at, records, scores, rows, scales,
        D, BLOCK_D, False, SCALED, True, ORDERED,
    )  # fmt: skip
    # But the row is live only when the mark protects it from this batch.
    tl.store(words + slot, wanted | LIVE_BITS, mask=made & (before < mark))
    tl.store(slots_at + at, tl.where(holds, slot | _FRESH_CODE, FULL), mask=missing)
    n_made = tl.sum(made.to(tl.int32), 0)
    n_holds = tl.sum(holds.to(tl.int32), 0)
    count(counters, APPLIED, n_made)
    count(counters, LIVE_CHANGE, n_made - tl.sum(was_live.to(tl.int32), 0))
    count(counters, INSERTED, n_made - tl.sum(gone.to(tl.int32), 0))
    count(counters, REFUSED, -n_holds)
    count_doubled(counters, n_holds - n_made)
