"""The compiled loops of the counting sketch: `counters` is u8[2^m, LINE], one line per key, four counters in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from param_server.table.kernels_cpu import _hash

LINE = 64
_ROWS = 4
_PER_ROW = LINE // _ROWS
_MOST = 255
_SALT = np.uint64(0xA24BAED4963EE407)
_HALF = np.uint64(32)
_LOW_BITS = np.uint64(_PER_ROW - 1)


@njit(cache=True, nogil=True, inline="always")
def _least(line: Any, h: Any) -> Any:
    least = np.int64(_MOST)
    for row in range(_ROWS):
        at = row * _PER_ROW + np.int64((h >> np.uint64(4 * row)) & _LOW_BITS)
        if line[at] < least:
            least = np.int64(line[at])
    return least


@njit(cache=True, nogil=True, inline="always")
def _lift(line: Any, h: Any, count: Any) -> None:
    for row in range(_ROWS):
        at = row * _PER_ROW + np.int64((h >> np.uint64(4 * row)) & _LOW_BITS)
        if np.int64(line[at]) < count:
            line[at] = count


@njit(cache=True, nogil=True, inline="always")
def _line_of(counters: Any, h: Any) -> Any:
    return np.int64((h >> _HALF) & np.uint64(counters.shape[0] - 1))


@njit(cache=True, nogil=True)
def add(counters: Any, keys: Any, counts: Any) -> None:
    """Count each key once; counts after."""
    for i in range(keys.size):
        h = _hash(np.uint64(keys[i]) ^ _SALT)
        line = counters[_line_of(counters, h)]
        count = min(_least(line, h) + 1, _MOST)
        _lift(line, h, count)
        counts[i] = count


@njit(cache=True, nogil=True)
def raise_to(counters: Any, keys: Any, counts: Any) -> None:
    """Make the count of each key at least what is given."""
    for i in range(keys.size):
        h = _hash(np.uint64(keys[i]) ^ _SALT)
        _lift(counters[_line_of(counters, h)], h, np.int64(counts[i]))


@njit(cache=True, nogil=True)
def estimate(counters: Any, keys: Any, counts: Any) -> None:
    """Counts of keys."""
    for i in range(keys.size):
        h = _hash(np.uint64(keys[i]) ^ _SALT)
        counts[i] = _least(counters[_line_of(counters, h)], h)
