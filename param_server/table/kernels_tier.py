"""Triton: what an evicting table does beside writing: uses renew scores, and entries are taken out.

In an evicting table a key lies in its home bucket only, so a lane that is emptied hides no other key.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from param_server.table.kernels import MARK_STRIDE, NOWHERE, STATE_SHIFT, TOMBSTONE, VERSION_STRIDE, search
from param_server.table.kernels_capture import copy_rows

_PINNED = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["n", "n_buckets"], do_not_specialize_on_alignment=["keys_at"])
def renew_kernel(
    keys_at, tick_at, gains_at, words, scores, n, n_buckets,
    K: tl.constexpr, FREQUENT: tl.constexpr, N_GAINS: tl.constexpr, GAIN_STEP: tl.constexpr,
):  # fmt: skip
    """Give the live ones of keys i64[n] the score of a use at `tick` i64[1]; a pinned one stays pinned.

    As `eviction.py` says. A key that comes twice in one batch may count once.
    """
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    slot = search(words, tl.load(keys_at + at, mask=inside, other=0), inside, n_buckets.to(tl.int64), K, False, False)
    found = slot >= 0
    tick = tl.load(tick_at)
    score = tl.load(scores + slot * MARK_STRIDE, mask=found, other=0).to(tl.int64) & 0xFFFFFFFF
    renewed = score * 0 + tick
    if FREQUENT:
        high = tl.maximum(score, renewed)
        step = (high - tl.minimum(score, renewed)) // GAIN_STEP
        gain = tl.load(gains_at + step, mask=found & (step < N_GAINS), other=0).to(tl.int64)
        renewed = tl.minimum(high + gain, _PINNED - 1)
    tl.store(scores + slot * MARK_STRIDE, renewed.to(tl.int32), mask=found & (score != _PINNED))


@triton.jit(
    do_not_specialize=["n", "n_buckets", "above"],
    do_not_specialize_on_alignment=[
        "keys_at", "gone_words", "gone_slots", "gone_versions", "gone_scores", "gone_stamps",
    ],
)  # fmt: skip
def take_out_kernel(
    keys_at, words, records, scores, stamps, rows, scales,
    gone_words, gone_slots, gone_versions, gone_scores, gone_stamps, gone_rows, n, n_buckets, above,
    D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """Empty the lanes of keys i64[n] whose score is greater than `above` (with DEAD: of tombstones among them).

    What lay there goes to its position in `gone_*`, with word 0 where nothing left.
    """
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    inside = at < n
    key = tl.load(keys_at + at, mask=inside, other=0)
    slot = search(words, key, inside, n_buckets.to(tl.int64), K, False, True)
    known = slot >= 0
    word = tl.load(words + slot, mask=known, other=0, cache_modifier=".cg")
    score = tl.load(scores + slot * MARK_STRIDE, mask=known, other=0)
    leaves = known & (word != 0) & ((score.to(tl.int64) & 0xFFFFFFFF) > above)
    if DEAD:
        leaves = leaves & (((word >> STATE_SHIFT) & 3) == TOMBSTONE)
    # One of two positions of a key takes it out.
    nothing = tl.where(leaves, word * 0, NOWHERE)
    place = words + tl.where(leaves, slot, 0)
    won = leaves & (tl.atomic_cas(place, tl.where(leaves, word, NOWHERE), nothing, sem="relaxed") == word)
    tl.store(gone_words + at, tl.where(won, word, 0), mask=inside)
    tl.store(gone_slots + at, slot, mask=won)
    tl.store(gone_versions + at, tl.load(records + slot * VERSION_STRIDE, mask=won, other=0), mask=won)
    tl.store(gone_scores + at, score, mask=won)
    tl.store(gone_stamps + at, tl.load(stamps + slot, mask=won, other=0), mask=won)
    copy_rows(at, slot, word, rows, scales, gone_rows, won, D, BLOCK_D, SCALED)
