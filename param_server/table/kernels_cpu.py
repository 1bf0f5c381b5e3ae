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
_INFINITE = np.float32(np.inf)


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
def guess(slots: Any, wanted: Any, entries: Any) -> None:
    """The entry that the first cell of each key names, -1 where it names none: most often the key's own."""
    n_cells = np.uint64(slots.size)
    for i in range(wanted.size):
        entries[i] = np.int64(slots[((_hash(wanted[i]) & _LOW) * n_cells) >> _HALF] & _LOW) - 1


@njit(cache=True, nogil=True, inline="always")
def _found(slots: Any, keys: Any, key: Any, guessed: Any) -> Any:
    """As `_find`. An entry once taken keeps its key, so a guess stays what it was while others are inserted."""
    return guessed if guessed >= 0 and keys[guessed] == key else _find(slots, keys, key)


@njit(cache=True, nogil=True)
def find_live(slots: Any, keys: Any, states: Any, wanted: Any, entries: Any) -> None:
    """Entries of live keys, -1 for the others.

    First every key's first cell, then what it names: neither pass waits for the other's cache misses. Nearly always
    that is the key; only else the cells behind it are looked at.
    """
    guess(slots, wanted, entries)
    for i in range(wanted.size):
        entry = _found(slots, keys, wanted[i], entries[i])
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
    guesses = np.empty(new_keys.size, np.int64)
    guess(slots, new_keys, guesses)
    for i in range(new_keys.size - 1, -1, -1):
        key = new_keys[i]
        entry = _found(slots, keys, key, guesses[i])
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
    sums = np.empty(dim, np.float32)
    guesses = np.empty(new_keys.size, np.int64)
    guess(slots, new_keys, guesses)
    for i in range(new_keys.size):
        key = new_keys[i]
        entry = _found(slots, keys, key, guesses[i])
        if entry >= 0 and versioned and new_versions[i] <= versions[entry]:
            stale += 1
            continue
        if entry < 0 and used >= keys.size:
            refused[i] = FULL
            continue
        was_live = entry >= 0 and states[entry] == LIVE
        # Loops without a branch: the compiler makes vectors of them.
        if was_live:
            for d in range(dim):
                sums[d] = rows[entry, d] + new_rows[i, d]
        else:
            for d in range(dim):
                sums[d] = new_rows[i, d]
        finite = np.int64(0)
        for d in range(dim):
            finite += np.int64(abs(sums[d]) < _INFINITE)
        if finite < dim:
            refused[i] = OVERFLOW
            continue
        if entry < 0:
            _insert(slots, keys, key, -1 - entry, used)
            entry = used
            versions[entry] = 0
            used += 1
        for d in range(dim):
            rows[entry, d] = sums[d]
        if not was_live:
            states[entry] = LIVE
            live += 1
        versions[entry] = max(versions[entry], new_versions[i])
        stamps[entry] = stamp
        applied += 1
    return applied, stale, used, live


@njit(cache=True, nogil=True)
def lay(
    slots: Any, keys: Any, states: Any, versions: Any, bits: Any, stamps: Any, stamp: Any, used: Any, live: Any,
    new_keys: Any, new_versions: Any, new_states: Any, new_bits: Any, entries: Any,
) -> Any:  # fmt: skip
    """Make entries what is given, whatever their versions, and note their numbers; (all found room, used, live).

    Rows are compared and copied as `bits` u32[n, dim]. Nothing is written where it is the same already: a page that
    other processes see stays theirs too.
    """
    dim = bits.shape[1]
    for i in range(new_keys.size):
        entry = _find(slots, keys, new_keys[i])
        if entry < 0:
            if used >= keys.size:
                return False, used, live
            _insert(slots, keys, new_keys[i], -1 - entry, used)
            entry = used
            states[entry] = 0
            used += 1
        entries[i] = entry
        differing = np.int64(0)
        for d in range(dim):
            differing += np.int64(bits[entry, d] != new_bits[i, d])
        if differing:
            for d in range(dim):
                bits[entry, d] = new_bits[i, d]
        if states[entry] != new_states[i]:
            live += np.int64(new_states[i] == LIVE) - np.int64(states[entry] == LIVE)
            states[entry] = new_states[i]
        if versions[entry] != new_versions[i]:
            versions[entry] = new_versions[i]
        if stamps[entry] != stamp:
            stamps[entry] = stamp
    return True, used, live


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
