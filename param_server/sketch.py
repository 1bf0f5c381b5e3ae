"""About how often keys were asked for: a count-min sketch of bytes that halves all counts again and again.

For keys that no tier holds: rows that are held carry their own count. Counts are never too small until they are halved,
and too great only where keys collide. One cache line per key: four bytes of it, only the least of which grow
(conservative update; Estan and Varghese 2002). After ten additions per key of `capacity_keys` all counts are halved
(Einziger et al. 2017, "TinyLFU"), so that what was asked for long ago is forgotten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from param_server.contract import I64
from param_server.table import kernels_sketch as kernels

U8 = NDArray[np.uint8]
_BYTES_PER_KEY = 8
_PERIOD = 10


class CountingSketch:
    """Counts up to 255 for about `capacity_keys` keys, in 8 bytes for each."""

    def __init__(self, capacity_keys: int) -> None:
        lines = max(1, capacity_keys * _BYTES_PER_KEY // kernels.LINE)
        self._counters = np.zeros((1 << (lines - 1).bit_length(), kernels.LINE), np.uint8)
        self._period = max(1, capacity_keys) * _PERIOD
        self._added = 0

    @property
    def bytes(self) -> int:
        """Memory set aside."""
        return self._counters.nbytes

    def add(self, keys: I64) -> U8:
        """Count keys i64[n] once each and return their counts u8[n], in order; a key may come twice."""
        counts = np.empty(keys.size, np.uint8)
        kernels.add(self._counters, np.array(keys, np.int64, order="C"), counts)
        self._added += keys.size
        if self._added >= self._period:
            self.halve()
        return counts

    def raise_to(self, keys: I64, counts: U8) -> None:
        """Make counts of keys at least these: what is known of rows that leave, or of a time before this process."""
        kernels.raise_to(self._counters, np.array(keys, np.int64, order="C"), np.array(counts, np.uint8, order="C"))

    def estimate(self, keys: I64) -> U8:
        """Counts u8[n] of keys i64[n]."""
        counts = np.empty(keys.size, np.uint8)
        kernels.estimate(self._counters, np.array(keys, np.int64, order="C"), counts)
        return counts

    def halve(self) -> None:
        """Halve all counts."""
        self._counters >>= 1
        self._added = 0
