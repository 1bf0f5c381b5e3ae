"""Triton: which slot a write goes to: the one its key has, or the first free one on its way.

A word claims its lane by one compare-and-swap for the whole key. Two positions of a batch with one new key try the same
lanes in the same order, so the second meets the first's word and shares its slot. Loads of words and records bypass the
L1 cache, which does not see what other multiprocessors write.

Codes in `slots` i64: slot | state before << 56, or one of STALE, FULL, MISSING.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import (
    FRESH_BITS,
    HOLE,
    LANES,
    LOW_BITS,
    MAX_HOPS,
    NOWHERE,
    ONE_HOP,
    STATE_SHIFT,
    any_of,
    home_of,
    is_key,
    mix,
    next_bucket,
    search,
    step_of,
)

STALE = tl.constexpr(-1)
FULL = tl.constexpr(-2)
MISSING = tl.constexpr(-3)
SLOT_BITS = tl.constexpr((1 << 56) - 1)
CODE_SHIFT = tl.constexpr(56)

# Rows of the counters, each spread over columns so that programs do not queue for one address.
APPLIED = tl.constexpr(0)
LIVE_CHANGE = tl.constexpr(1)
INSERTED = tl.constexpr(2)
REFUSED = tl.constexpr(3)
DOUBLED = tl.constexpr(4)
SPREAD = tl.constexpr(64)


@triton.jit
def count(counters, row: tl.constexpr, amount):
    """Add a scalar to one counter; most programs have nothing to add to most of them."""
    if amount != 0:
        tl.atomic_add(counters + row * SPREAD + tl.program_id(0) % SPREAD, amount.to(tl.int64), sem="relaxed")


@triton.jit
def count_doubled(counters, amount):
    """Add to the one counter that a kernel reads: rare, so all of it is in the first column."""
    if amount != 0:
        tl.atomic_add(counters + DOUBLED * SPREAD, amount.to(tl.int64), sem="relaxed")


@triton.jit
def swap(words, bucket, lane, old, new, mask):
    """Compare-and-swap where `mask`; return what was there. Elsewhere nothing can match NOWHERE."""
    place = words + bucket * LANES + tl.where(mask, lane, 0)
    return tl.atomic_cas(place, tl.where(mask, old, NOWHERE), tl.where(mask, new, NOWHERE), sem="relaxed")


@triton.jit
def look(words, bucket, wanted, pending, K: tl.constexpr):
    """Lane of the key `wanted` (or -1), and the first free lane (or LANES) with the word it holds."""
    pair = tl.arange(0, 2)
    lane = tl.full([K], -1, tl.int32)
    free = tl.full([K], LANES, tl.int32)
    held = tl.full([K], 0, tl.int64)
    for first in tl.static_range(0, LANES, 2):
        at = words + bucket[:, None] * LANES + (first + pair)[None, :]
        line = tl.load(at, mask=pending[:, None], other=0, cache_modifier=".cg")
        number = (first + pair)[None, :]
        lane = tl.maximum(lane, tl.max(tl.where(is_key(line, wanted[:, None]), number, -1), 1))
        here = tl.min(tl.where((line == 0) | (line == HOLE), number, LANES), 1)
        word = tl.sum(tl.where(number == here[:, None], line, 0), 1)
        held = tl.where((free == LANES) & (here < LANES), word, held)
        free = tl.minimum(free, here)
    return lane, free, held


@triton.jit
def _enter(words, key, entering, n_buckets, K: tl.constexpr):
    """Slot i64[K] of keys that have none, in the first free lane on their way (-1: none), and who made it."""
    h = mix(key)
    bucket = home_of(h, n_buckets)
    step = step_of(h, n_buckets)
    wanted = (h & LOW_BITS).to(tl.int64)
    slot = tl.full([K], -1, tl.int64)
    made = tl.full([K], 0, tl.int32)
    hops = tl.full([K], 0, tl.int32)
    pending = entering
    while any_of(pending):
        lane, free, held = look(words, bucket, wanted, pending, K)
        slot = tl.where(pending & (lane >= 0), bucket * LANES + lane, slot)
        room = pending & (lane < 0) & (free < LANES)
        won = room & (swap(words, bucket, free, held, wanted | FRESH_BITS, room) == held)
        slot = tl.where(won, bucket * LANES + free, slot)
        made += won.to(tl.int32)
        # Who lost a swap looks at the same bucket again: the winner may hold the same key.
        onward = pending & (slot < 0) & (free == LANES)
        bucket = tl.where(onward, next_bucket(bucket, step, n_buckets), bucket)
        wanted = tl.where(onward, wanted + ONE_HOP, wanted)
        hops += onward.to(tl.int32)
        pending = pending & (slot < 0) & (hops <= MAX_HOPS)
    return slot, made


@triton.jit
def locate(
    words, key, inside, allowed, n_buckets, counters, K: tl.constexpr, INSERT: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    """Slot i64[K] (or -1) and state i32[K] of keys; with INSERT, new ones that are allowed get a slot, state FRESH."""
    slot = search(words, key, inside, n_buckets, K, CHAIN, True)
    if INSERT:
        entering = allowed & (slot < 0)
        if any_of(entering):
            place, made = _enter(words, key, entering, n_buckets, K)
            slot = tl.where(entering, place, slot)
            count(counters, INSERTED, tl.sum(made, 0))
    word = tl.load(words + slot, mask=slot >= 0, other=0, cache_modifier=".cg")
    return slot, (word >> STATE_SHIFT).to(tl.int32) & 3


@triton.jit
def code_of(slot, state, entered, INSERT: tl.constexpr):
    """What `slots` holds for a position."""
    code = tl.where(slot >= 0, STALE, FULL if INSERT else MISSING).to(tl.int64)
    return tl.where(entered, slot | (state.to(tl.int64) << CODE_SHIFT), code)


@triton.jit(do_not_specialize=["n", "n_buckets"], do_not_specialize_on_alignment=["keys_at", "allowed_at", "slots_at"])
def claim_kernel(
    keys_at, allowed_at, slots_at, words, counters, n, n_buckets,
    K: tl.constexpr, INSERT: tl.constexpr, CHAIN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Fill slots i64[n] and write nothing else. Without INSERT a key that is not there is MISSING."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    key = tl.load(keys_at + at, mask=inside, other=0)
    allowed = inside
    if GATED:
        allowed = inside & (tl.load(allowed_at + at, mask=inside, other=0) != 0)
    slot, state = locate(words, key, inside, allowed, n_buckets.to(tl.int64), counters, K, INSERT, CHAIN)
    code = code_of(slot, state, slot >= 0, INSERT)
    tl.store(slots_at + at, code, mask=inside)
    count(counters, REFUSED, tl.sum((inside & (code < STALE)).to(tl.int32), 0))
