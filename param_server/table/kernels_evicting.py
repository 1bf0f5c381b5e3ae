"""The compiled loops a table needs to lose rows again: visits that renew scores, upserts that evict, removal.

Arrays are those of `kernels_cpu.py`, whose lookups and writes of known keys are used as they are; `stamps` u32 are
`2 * n + dirty`: changed after capture n - 1, and since it came from below. In addition: `scores` u32, `marks` u32 (the
upsert that wrote an entry, so that it cannot evict its own), and `free` i64, a stack of entries whose rows have left. A
free entry has state 0. Removal moves later cells of a run back, so a probe still ends at the first empty cell.

`first`, `end` and `limit` are of a capture under way: entries in [first, end) with a stamp up to `limit` belong to it
and must be copied before they change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from param_server.eviction import FREQUENT, GAIN_STEP, KEEP, PINNED
from param_server.table.kernels_cpu import BLOCK, FULL, LIVE, TOMBSTONE, _find, _hash, find_live, gather

FREE = 0
WINDOW = 32
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@njit(cache=True, nogil=True, inline="always")
def _renewed(score: Any, mode: Any, tick: Any, gains: Any) -> Any:
    if mode == KEEP or score == PINNED:
        return score
    if mode != FREQUENT:
        return tick
    high = max(score, tick)
    step = (high - min(score, tick)) // GAIN_STEP
    return min(high + (np.int64(gains[step]) if step < gains.size else 0), PINNED - 1)


@njit(cache=True, nogil=True)
def visit(
    slots: Any, keys: Any, states: Any, rows: Any, scores: Any, wanted: Any, default: Any, out: Any, found: Any,
    mode: Any, tick: Any, gains: Any,
) -> Any:  # fmt: skip
    """A lookup that counts as a use; how many were found."""
    n = wanted.size
    hits = 0
    entries = np.empty(min(n, BLOCK), np.int64)
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        some = entries[: end - start]
        find_live(slots, keys, states, wanted[start:end], some)
        for i in range(some.size):
            if some[i] >= 0:
                hits += 1
                scores[some[i]] = _renewed(np.int64(scores[some[i]]), mode, tick, gains)
        gather(rows, some, default, out[start:end], found[start:end])
    return hits


@njit(cache=True, nogil=True, inline="always")
def _home(slots: Any, key: Any) -> Any:
    return np.int64(((_hash(key) & _LOW) * np.uint64(slots.size)) >> _HALF)


@njit(cache=True, nogil=True)
def _erase(slots: Any, keys: Any, key: Any) -> None:
    """Take a key that is there out of the index."""
    n_cells = slots.size
    entry = _find(slots, keys, key)
    hole = _home(slots, key)
    while np.int64(slots[hole] & _LOW) - 1 != entry:
        hole = hole + 1 if hole + 1 < n_cells else 0
    at = hole + 1 if hole + 1 < n_cells else 0
    while slots[at] != 0:
        home = _home(slots, keys[np.int64(slots[at] & _LOW) - 1])
        # A cell may move back into the hole unless its home lies behind the hole.
        from_home = at - home if at >= home else at - home + n_cells
        from_hole = at - hole if at >= hole else at - hole + n_cells
        if from_home >= from_hole:
            slots[hole] = slots[at]
            hole = at
        at = at + 1 if at + 1 < n_cells else 0
    slots[hole] = 0


@njit(cache=True, nogil=True, inline="always")
def _copy_out(
    entry: Any, at: Any, keys: Any, states: Any, versions: Any, rows: Any, scores: Any, stamps: Any,
    out_keys: Any, out_versions: Any, out_dead: Any, out_rows: Any, out_scores: Any, out_dirty: Any,
) -> None:  # fmt: skip
    out_keys[at] = keys[entry]
    out_versions[at] = versions[entry]
    out_dead[at] = states[entry] == TOMBSTONE
    out_scores[at] = scores[entry]
    out_dirty[at] = stamps[entry] & 1
    for d in range(rows.shape[1]):
        out_rows[at, d] = rows[entry, d]


@njit(cache=True, nogil=True, inline="always")
def _victim(states: Any, scores: Any, marks: Any, mark: Any, used: Any, hand: Any) -> Any:
    """The entry of least score in the window behind the hand, not of this upsert; -1 if there is none."""
    best = -1
    least = np.int64(PINNED)
    for i in range(min(WINDOW, used)):
        entry = (hand + i) % used
        if states[entry] != FREE and marks[entry] != mark and np.int64(scores[entry]) < least:
            best = entry
            least = np.int64(scores[entry])
    return best


@njit(cache=True, nogil=True)
def upsert(
    slots: Any, keys: Any, states: Any, versions: Any, rows: Any, scores: Any, stamps: Any, marks: Any, free: Any,
    stamp: Any, first: Any, end: Any, limit: Any, mark: Any, n_free: Any, used: Any, live: Any, hand: Any,
    new_keys: Any, new_versions: Any, new_dead: Any, new_rows: Any, new_scores: Any, new_dirty: Any,
    force: Any, refused: Any, out_captured: Any,
    out_keys: Any, out_versions: Any, out_dead: Any, out_rows: Any, out_scores: Any, out_dirty: Any,
) -> Any:  # fmt: skip
    """Write entries, newest wins; without room evict the least of a window, without `force` only a lesser one."""
    applied = 0
    stale = 0
    n_out = 0
    dim = rows.shape[1]
    for i in range(new_keys.size):
        entry = _find(slots, keys, new_keys[i])
        if entry >= 0:
            marks[entry] = mark
    for i in range(new_keys.size - 1, -1, -1):
        key = new_keys[i]
        entry = _find(slots, keys, key)
        if entry >= 0:
            if new_versions[i] <= versions[entry]:
                stale += 1
                continue
            scores[entry] = max(scores[entry], new_scores[i])
        else:
            if n_free > 0:
                n_free -= 1
                entry = free[n_free]
            elif used < keys.size:
                entry = used
                used += 1
            else:
                entry = _victim(states, scores, marks, mark, used, hand)
                if entry < 0 or not (force or scores[entry] < new_scores[i]):
                    hand = (hand + WINDOW) % used
                    refused[i] = FULL
                    continue
                # The new row has all others to go before it is looked at.
                hand = (entry + 1) % used
                _copy_out(entry, n_out, keys, states, versions, rows, scores, stamps,
                          out_keys, out_versions, out_dead, out_rows, out_scores, out_dirty)  # fmt: skip
                out_captured[n_out] = first <= entry < end and stamps[entry] <= limit
                n_out += 1
                live -= states[entry] == LIVE
                _erase(slots, keys, keys[entry])
            cell = -1 - _find(slots, keys, key)
            slots[cell] = ((_hash(key) >> _HALF) << _HALF) | np.uint64(entry + 1)
            keys[entry] = key
            states[entry] = FREE
            scores[entry] = new_scores[i]
        stamps[entry] = stamp + new_dirty[i]
        marks[entry] = mark
        live += np.int64(not new_dead[i]) - np.int64(states[entry] == LIVE)
        states[entry] = TOMBSTONE if new_dead[i] else LIVE
        versions[entry] = new_versions[i]
        for d in range(dim):
            rows[entry, d] = new_rows[i, d]
        applied += 1
    return applied, stale, n_out, n_free, used, live, hand


@njit(cache=True, nogil=True)
def remove(
    slots: Any, keys: Any, states: Any, versions: Any, rows: Any, scores: Any, stamps: Any, free: Any,
    first: Any, end: Any, limit: Any, n_free: Any, live: Any, wanted: Any, above: Any, out_captured: Any,
    out_keys: Any, out_versions: Any, out_dead: Any, out_rows: Any, out_scores: Any, out_dirty: Any,
) -> Any:  # fmt: skip
    """Take out the wanted keys whose score is greater than `above`."""
    n_out = 0
    for i in range(wanted.size):
        entry = _find(slots, keys, wanted[i])
        if entry < 0 or np.int64(scores[entry]) <= above:
            continue
        _copy_out(entry, n_out, keys, states, versions, rows, scores, stamps,
                  out_keys, out_versions, out_dead, out_rows, out_scores, out_dirty)  # fmt: skip
        out_captured[n_out] = first <= entry < end and stamps[entry] <= limit
        n_out += 1
        live -= states[entry] == LIVE
        _erase(slots, keys, keys[entry])
        states[entry] = FREE
        free[n_free] = entry
        n_free += 1
    return n_out, n_free, live


@njit(cache=True, nogil=True)
def about_to_change(
    slots: Any, keys: Any, stamps: Any, first: Any, end: Any, limit: Any, stamp: Any, wanted: Any, out: Any
) -> Any:
    """Entries of wanted keys that belong to the capture, which from now on has them; how many."""
    count = 0
    for i in range(wanted.size):
        entry = _find(slots, keys, wanted[i])
        if first <= entry < end and stamps[entry] <= limit:
            stamps[entry] = stamp + (stamps[entry] & 1)
            out[count] = entry
            count += 1
    return count


@njit(cache=True, nogil=True)
def tombstones(slots: Any, keys: Any, states: Any, wanted: Any, out: Any) -> Any:
    """Those of the wanted keys that are deleted; how many."""
    count = 0
    for i in range(wanted.size):
        entry = _find(slots, keys, wanted[i])
        if entry >= 0 and states[entry] == TOMBSTONE:
            out[count] = wanted[i]
            count += 1
    return count


@njit(cache=True, nogil=True)
def below(states: Any, scores: Any, keys: Any, start: Any, end: Any, limit: Any, out: Any) -> Any:
    """Keys of entries in [start, end) whose score is less than the limit; how many."""
    count = 0
    for entry in range(start, end):
        if states[entry] != FREE and np.int64(scores[entry]) < limit:
            out[count] = keys[entry]
            count += 1
    return count


@njit(cache=True, nogil=True)
def weakest(states: Any, scores: Any, used: Any, hand: Any) -> Any:
    """Least score of the window behind the hand."""
    least = np.int64(PINNED)
    for i in range(min(WINDOW, used)):
        entry = (hand + i) % used
        if states[entry] != FREE:
            least = min(least, np.int64(scores[entry]))
    return least


@njit(cache=True, nogil=True)
def set_score(slots: Any, keys: Any, scores: Any, wanted: Any, score: Any) -> None:
    """Give the wanted keys that are there a score."""
    for i in range(wanted.size):
        entry = _find(slots, keys, wanted[i])
        if entry >= 0:
            scores[entry] = score
