"""The compiled loops of recall in host memory: ranks that sort as plain integers, and who wins among equals.

Arrays are those of `kernels_cpu.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from param_server.table.kernels_cpu import LIVE, _find

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


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
