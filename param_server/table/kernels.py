"""Triton: how a key finds its slot, and the lookup (probe and gather in one kernel).

The index is one array of 64-bit words, eight to a bucket, 64 bytes: what the card fetches at once, so that a lookup
costs one access for the index and one for the row. Slot = bucket * 8 + lane. The row lies at the slot, and so does a
record of 16 bytes for writers: version u64, mark i32, score u32.

A word is a whole key. `h` is a bijection of the key (finaliser of MurmurHash3, Appleby), the home bucket is
`high 32 bits of h * n_buckets >> 32`, and with at least 1024 buckets the bucket implies the top 10 bits of `h`. Their
place is taken by what a key does not know of itself:

    word = state (2 bits) | hop (8 bits) | low 54 bits of h        state: 1 live, 2 tombstone, 3 fresh

`hop` says how many steps from home the word lies. So equal words in one bucket mean equal keys and no key is reserved;
words of state 0 are no keys: 0 is a lane that was never taken, and it ends a search. A lane that was once taken never
becomes 0 again (`kernels_tidy.py` leaves holes). The step from bucket to bucket depends on the key and n_buckets is a
prime, so that every search can reach every bucket and full buckets do not run together.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LIVE = tl.constexpr(1)
TOMBSTONE = tl.constexpr(2)
FRESH = tl.constexpr(3)

LANES = tl.constexpr(8)
HOP_SHIFT = tl.constexpr(54)
STATE_SHIFT = tl.constexpr(62)
LOW_BITS = tl.constexpr((1 << 54) - 1)
ONE_HOP = tl.constexpr(1 << 54)
# The states in their place, as signed numbers.
LIVE_BITS = tl.constexpr(1 << 62)
TOMBSTONE_BITS = tl.constexpr(-(1 << 63))
FRESH_BITS = tl.constexpr(-(1 << 62))
# Words that are no keys: what a moved word leaves behind, one that is being moved, and one that is nowhere.
HOLE = tl.constexpr(1)
MOVING = tl.constexpr(2)
NOWHERE = tl.constexpr(3)
# Versions are every second u64 of what writers keep, marks and scores every fourth i32.
VERSION_STRIDE = tl.constexpr(2)
MARK_STRIDE = tl.constexpr(4)
MAX_HOPS = tl.constexpr(255)

_MULTIPLY_1 = tl.constexpr(0xFF51AFD7ED558CCD)
_MULTIPLY_2 = tl.constexpr(0xC4CEB9FE1A85EC53)


@triton.jit
def mix(keys):
    """i64 -> u64, a bijection."""
    h = keys.to(tl.uint64, bitcast=True)
    h = (h ^ (h >> 33)) * _MULTIPLY_1
    h = (h ^ (h >> 33)) * _MULTIPLY_2
    return h ^ (h >> 33)


@triton.jit
def home_of(h, n_buckets):
    """Home bucket i64 of a mixed key; n_buckets i64."""
    return (((h >> 32) * n_buckets.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def step_of(h, n_buckets):
    """Distance i64 in [1, n_buckets) between the buckets a key may lie in."""
    return 1 + (((h & 0xFFFFFFFF) * (n_buckets - 1).to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def next_bucket(bucket, step, n_buckets):
    """The bucket one hop further."""
    bucket += step
    return tl.where(bucket >= n_buckets, bucket - n_buckets, bucket)


@triton.jit
def any_of(mask):
    """Whether a block of booleans holds a true one, as a scalar."""
    return tl.max(mask.to(tl.int32), 0) != 0


@triton.jit
def is_key(word, wanted):
    """Whether words hold the keys `wanted` (words without a state). Empty lanes and holes have no state, so no key."""
    return (((word ^ wanted) << 2) == 0) & ((word >> STATE_SHIFT) != 0)


@triton.jit
def scan(words, bucket, wanted, pending, K: tl.constexpr, ANY: tl.constexpr):
    """Lane i32[K] (or -1) of the word `wanted` in each bucket, and whether the bucket has no empty lane.

    With ANY the state does not matter. Two words at a time make one 16-byte access, and a thread keeps the whole bucket
    of its key to itself: nothing has to be exchanged.
    """
    pair = tl.arange(0, 2)
    lane = tl.full([K], -1, tl.int32)
    full = pending
    for first in tl.static_range(0, LANES, 2):
        at = words + bucket[:, None] * LANES + (first + pair)[None, :]
        # `!= 0`: the interpreter widens a condition that was combined with a plain number.
        line = tl.load(at, mask=(pending != 0)[:, None], other=0)
        same = is_key(line, wanted[:, None]) if ANY else line == wanted[:, None]
        lane = tl.maximum(lane, tl.max(tl.where(same, (first + pair)[None, :], -1), 1))
        if first == LANES - 2:
            full = full & (tl.min((line != 0).to(tl.int32), 1) != 0)
    return lane, full


@triton.jit
def search(words, keys, inside, n_buckets, K: tl.constexpr, CHAIN: tl.constexpr, ANY: tl.constexpr):
    """Slot i64[K] of keys i64[K] that are live (or, with ANY, known at all), -1 for the others.

    Without CHAIN only the home bucket is searched.
    """
    h = mix(keys)
    bucket = home_of(h, n_buckets)
    step = step_of(h, n_buckets)
    wanted = (h & LOW_BITS).to(tl.int64)
    if not ANY:
        wanted = wanted | LIVE_BITS
    slot = tl.full([K], -1, tl.int64)
    pending = inside
    hops = 0
    while any_of(pending):
        lane, full = scan(words, bucket, wanted, pending, K, ANY)
        slot = tl.where(pending & (lane >= 0), bucket * LANES + lane, slot)
        pending = pending & (lane < 0) & full & (hops < (MAX_HOPS if CHAIN else 0))
        bucket = next_bucket(bucket, step, n_buckets)
        wanted += ONE_HOP
        hops += 1
    return slot


@triton.jit
def widen(tile, scales, slot, mask, SCALED: tl.constexpr):
    """Rows as f32; rows of bytes are multiplied by the scale of their slot."""
    tile = tile.to(tl.float32)
    if SCALED:
        tile = tile * tl.load(scales + slot, mask=mask, other=0.0)[:, None]
    return tile


@triton.jit(
    do_not_specialize=["n", "n_buckets"], do_not_specialize_on_alignment=["keys_at", "found_at"]
)  # a new size must not compile anew
def lookup_kernel(
    keys_at, out, found_at, words, rows, scales, default_row, n, n_buckets,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, CHAIN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows out[n, D] and found u8[n] for keys i64[n]. `default_row` has the type of `out`."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    slot = search(words, tl.load(keys_at + at, mask=inside, other=0), inside, n_buckets.to(tl.int64), K, CHAIN, False)
    found = slot >= 0
    tl.store(found_at + at, found.to(tl.uint8), mask=inside)
    column = tl.arange(0, BLOCK_D)
    in_row = column < D
    default = tl.load(default_row + column, mask=in_row, other=0)
    source = rows + slot[:, None] * D + column[None, :]
    mask = found[:, None] & in_row[None, :]
    if rows.dtype == out.dtype:
        tile = tl.load(source, mask=mask, other=default[None, :])
    else:
        tile = widen(tl.load(source, mask=mask, other=0), scales, slot, found, SCALED).to(out.dtype.element_ty)
        tile = tl.where(found[:, None], tile, default[None, :])
    tl.store(out + at[:, None] * D + column[None, :], tile, mask=inside[:, None] & in_row[None, :])


@triton.jit(do_not_specialize=["n", "n_buckets"], do_not_specialize_on_alignment=["keys_at", "slots_at"])
def find_kernel(keys_at, slots_at, words, n, n_buckets, K: tl.constexpr, CHAIN: tl.constexpr):
    """Slots i64[n] of live keys i64[n], -1 for the others."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    slot = search(words, tl.load(keys_at + at, mask=inside, other=0), inside, n_buckets.to(tl.int64), K, CHAIN, False)
    tl.store(slots_at + at, slot, mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["slots_at"])
def gather_kernel(
    slots_at, out, rows, scales, n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows out[n, D] of slots i64[n]; zeros where the slot is negative."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    slot = tl.load(slots_at + at, mask=inside, other=-1)
    column = tl.arange(0, BLOCK_D)
    in_row = column < D
    held = slot >= 0
    tile = tl.load(rows + slot[:, None] * D + column[None, :], mask=held[:, None] & in_row[None, :], other=0)
    if SCALED:
        tile = widen(tile, scales, slot, held, SCALED)
    mask = inside[:, None] & in_row[None, :]
    tl.store(out + at[:, None] * D + column[None, :], tile.to(out.dtype.element_ty), mask=mask)
