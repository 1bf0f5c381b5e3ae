"""The compiled loops of the CPU table. Arrays in, arrays and counts out; they allocate nothing but a block of slots.

Layout: `slots` u64[cells] is the index, open addressing with linear probing. A cell is 0 (never used) or
`tag << 32 | entry + 1`, where tag is the high half of the key's hash: a probe touches the key array only where the tag
agrees. Entries are dense and never move: `keys` i64, `states` u8, `versions` u64, `rows` f32[capacity, dim], and
`stamps` u32, which say between which captures an entry last changed; `used` of them are taken. A probe ends because
cells outnumber entries. No key is reserved: emptiness is in the cell.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LIVE = 1
TOMBSTONE = 2
FULL = 1
OVERFLOW = 2

BLOCK = 4096
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xD6E8FEB86659FD93)
_MULTIPLY_2 = np.uint64(0xCF3AD63B6B9D4E35)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@njit(cache=True, nogil=True, inline="always")
def _hash(key: Any) -> Any:
    # Other constants than routing's: the keys of one shard share the high bits of that hash.
    x = np.uint64(key) ^ _SEED
    x = (x ^ (x >> _HALF)) * _MULTIPLY_1
    x = (x ^ (x >> _HALF)) * _MULTIPLY_2
    return x ^ (x >> _HALF)


@njit(cache=True, nogil=True)
def _find(slots: Any, keys: Any, key: Any) -> Any:
    """Entry of the key, or -1 - (cell where it would go)."""
    n_cells = np.uint64(slots.size)
    h = _hash(key)
    tag = h >> _HALF
    # The low half spreads over any number of cells, so that memory need not come in powers of two.
    at = ((h & _LOW) * n_cells) >> _HALF
    while True:
        cell = slots[at]
        if cell == 0:
            return -np.int64(at) - 1
        if cell >> _HALF == tag:
            entry = np.int64(cell & _LOW) - 1
            if keys[entry] == key:
                return entry
        at += _ONE
        if at == n_cells:
            at = np.uint64(0)


@njit(cache=True, nogil=True, inline="always")
def _insert(slots: Any, keys: Any, key: Any, cell: Any, used: Any) -> None:
    slots[cell] = ((_hash(key) >> _HALF) << _HALF) | np.uint64(used + 1)
    keys[used] = key


@njit(cache=True, nogil=True)
def find_live(slots: Any, keys: Any, states: Any, wanted: Any, entries: Any) -> None:
    """Entries of live keys, -1 for the others.

    First every key's first cell, then what it names: neither pass waits for the other's cache misses. Nearly always
    that is the key; only else the cells behind it are looked at.
    """
    n_cells = np.uint64(slots.size)
    for i in range(wanted.size):
        entries[i] = np.int64(slots[((_hash(wanted[i]) & _LOW) * n_cells) >> _HALF] & _LOW) - 1
    for i in range(wanted.size):
        guess = entries[i]
        entry = guess if guess >= 0 and keys[guess] == wanted[i] else _find(slots, keys, wanted[i])
        entries[i] = entry if entry >= 0 and states[entry] == LIVE else -1


@njit(cache=True, nogil=True)
def gather(rows: Any, entries: Any, default: Any, out: Any, found: Any) -> None:
    """Rows of entries, the default row where they are negative."""
    dim = rows.shape[1]
    for i in range(entries.size):
        found[i] = entries[i] >= 0
    for i in range(entries.size):
        entry = max(entries[i], 0)
        for d in range(dim):
            out[i, d] = rows[entry, d]
    for i in range(entries.size):
        if entries[i] < 0:
            for d in range(dim):
                out[i, d] = default[d]


@njit(cache=True, nogil=True)
def lookup(slots: Any, keys: Any, states: Any, rows: Any, wanted: Any, default: Any, out: Any, found: Any) -> None:
    """Rows and found of keys, a block at a time: as many cache misses as can be under way together."""
    n = wanted.size
    entries = np.empty(min(n, BLOCK), np.int64)
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        some = entries[: end - start]
        find_live(slots, keys, states, wanted[start:end], some)
        gather(rows, some, default, out[start:end], found[start:end])


@njit(cache=True, nogil=True)
def assign(
    slots: Any, keys: Any, states: Any, versions: Any, rows: Any, stamps: Any, stamp: Any, used: Any, live: Any,
    new_keys: Any, new_versions: Any, new_rows: Any, delete: Any, refused: Any,
) -> Any:  # fmt: skip
    """Assign or delete, newest wins. Backwards, so that `greater` alone makes the last of equal versions win."""
    applied = 0
    stale = 0
    dim = rows.shape[1]
    for i in range(new_keys.size - 1, -1, -1):
        key = new_keys[i]
        entry = _find(slots, keys, key)
        if entry >= 0:
            if new_versions[i] <= versions[entry]:
                stale += 1
                continue
        else:
            if used >= keys.size:
                refused[i] = FULL
                continue
            _insert(slots, keys, key, -1 - entry, used)
            entry = used
            states[entry] = TOMBSTONE
            used += 1
        if states[entry] == LIVE:
            live -= 1
        versions[entry] = new_versions[i]
        stamps[entry] = stamp
        applied += 1
        if delete:
            states[entry] = TOMBSTONE
            for d in range(dim):
                rows[entry, d] = 0
        else:
            states[entry] = LIVE
            live += 1
            for d in range(dim):
                rows[entry, d] = new_rows[i, d]
    return applied, stale, used, live


@njit(cache=True, nogil=True)
def add(
    slots: Any, keys: Any, states: Any, versions: Any, rows: Any, stamps: Any, stamp: Any, used: Any, live: Any,
    new_keys: Any, new_versions: Any, new_rows: Any, versioned: Any, refused: Any,
) -> Any:  # fmt: skip
    """Add to the live row or to zeros; in order, so that sums round the same way every time."""
    applied = 0
    stale = 0
    dim = rows.shape[1]
    for i in range(new_keys.size):
        key = new_keys[i]
        entry = _find(slots, keys, key)
        if entry >= 0 and versioned and new_versions[i] <= versions[entry]:
            stale += 1
            continue
        if entry < 0 and used >= keys.size:
            refused[i] = FULL
            continue
        was_live = entry >= 0 and states[entry] == LIVE
        finite = True
        for d in range(dim):
            total = rows[entry, d] + new_rows[i, d] if was_live else new_rows[i, d]
            finite = finite and np.isfinite(total)
        if not finite:
            refused[i] = OVERFLOW
            continue
        if entry < 0:
            _insert(slots, keys, key, -1 - entry, used)
            entry = used
            versions[entry] = 0
            used += 1
        for d in range(dim):
            rows[entry, d] = rows[entry, d] + new_rows[i, d] if was_live else new_rows[i, d]
        if not was_live:
            states[entry] = LIVE
            live += 1
        versions[entry] = max(versions[entry], new_versions[i])
        stamps[entry] = stamp
        applied += 1
    return applied, stale, used, live


@njit(cache=True, nogil=True)
def about_to_change(
    slots: Any, keys: Any, stamps: Any, wanted: Any, since: Any, upto: Any, start: Any, end: Any, out: Any
) -> Any:
    """Write the entries in [start, end) of the wanted keys whose stamp is in (since, upto]; return how many.

    They are stamped as changed after `upto` at once, so that none is found twice.
    """
    count = 0
    for i in range(wanted.size):
        entry = _find(slots, keys, wanted[i])
        if start <= entry < end and since < stamps[entry] <= upto:
            stamps[entry] = upto + 1
            out[count] = entry
            count += 1
    return count


@njit(cache=True, nogil=True)
def changed(stamps: Any, since: Any, upto: Any, start: Any, end: Any, out: Any) -> Any:
    """Write entries from `start` on whose stamp is in (since, upto] until `out` is full; (how many, where to go on)."""
    count = 0
    entry = start
    while entry < end and count < out.size:
        if since < stamps[entry] <= upto:
            out[count] = entry
            count += 1
        entry += 1
    return count, entry


@njit(cache=True, nogil=True)
def rank(scores: Any, slots: Any, keys: Any, states: Any, used: Any, exclude: Any, ranks: Any) -> Any:
    """Write one u64 per live entry with a finite score, smaller is better; return how many.

    A rank is `descending order of the score << 32 | entry`, so that numpy's partition and sort of plain integers do the
    selection. IEEE floats order like their bits once the sign is folded; adding 0 makes -0 equal to 0.
    """
    for i in range(exclude.size):
        entry = _find(slots, keys, exclude[i])
        if entry >= 0:
            scores[entry] = np.inf
    zero = np.float32(0)
    for entry in range(used):
        scores[entry] += zero
    bits = scores.view(np.uint32)
    count = 0
    for entry in range(used):
        b = np.uint64(bits[entry])
        # All ones in the exponent: infinite or not a number.
        if states[entry] != LIVE or (b & np.uint64(0x7F800000)) == np.uint64(0x7F800000):
            continue
        order = b if b >> np.uint64(31) else np.uint64(0x7FFFFFFF) - b
        ranks[count] = (order << _HALF) | np.uint64(entry)
        count += 1
    return count


@njit(cache=True, nogil=True)
def settle(ranks: Any, rest: Any, slots: Any, keys: Any) -> Any:
    """Entries i64[k] of sorted `ranks`, every run of equal scores in ascending order of key.

    The last run may have lost members to `rest` (unsorted, none better): it is filled with the least keys of both.
    """
    k = ranks.size
    best = np.empty(k, np.int64)
    start = 0
    while start < k:
        score = ranks[start] >> _HALF
        end = start + 1
        while end < k and ranks[end] >> _HALF == score:
            end += 1
        more = 0
        if end == k:
            for i in range(rest.size):
                more += rest[i] >> _HALF == score
        if end - start + more == 1:
            best[start] = np.int64(ranks[start] & _LOW)
        else:
            tied = np.empty(end - start + more, np.int64)
            for i in range(start, end):
                tied[i - start] = keys[np.int64(ranks[i] & _LOW)]
            at = end - start
            for i in range(rest.size if more else 0):
                if rest[i] >> _HALF == score:
                    tied[at] = keys[np.int64(rest[i] & _LOW)]
                    at += 1
            tied.sort()
            for i in range(start, end):
                best[i] = _find(slots, keys, tied[i - start])
        start = end
    return best
