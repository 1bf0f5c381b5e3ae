"""The first value of a row that the parameter server does not have: normal numbers made of seed, table and key alone.

Whoever meets the key first, and however often, finds the same row, so several trainers may give it at once. Pure.

Numbers: SplitMix64 (Steele, Lea, Flood 2014) of a counter, turned normal by Box and Muller (1958).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def initial_rows(keys: I64, dim: int, *, seed: int, table_id: int, spread: float) -> F32:
    """Rows f32[n, dim] of standard deviation `spread` for keys i64[n]."""
    with np.errstate(over="ignore"):
        salt = _mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) * _GOLDEN + np.uint64(table_id))
        of_keys = _mixed(keys.view(np.uint64) + salt)[:, None]
        columns = np.arange(2 * dim, dtype=np.uint64) * _GOLDEN
        bits = _mixed(of_keys + columns) >> np.uint64(11)
    # In (0, 1): the logarithm of 0 is nobody's row.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:, :dim])), 2.0 * np.pi * uniform[:, dim:]
    return (spread * radius * np.cos(angle)).astype(np.float32)


def _mixed(x: U64) -> U64:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
