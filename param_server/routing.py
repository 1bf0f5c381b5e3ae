"""Key -> partition -> shard. Pure and frozen: producers, shards and clients must agree, and logs outlive processes.

A partition is a range of the hashed key space and a shard owns neighbouring partitions: every partition feeds exactly
one shard. Golden vectors in `tests/golden/routing.json` pin both functions.

Hash: the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's mix 13). Keys that are hashes
already lose nothing; small integers (buckets, gaps) are spread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def partition_of(keys: I64, n_partitions: int) -> I32:
    """Return the partition of each key: i64[n] -> i32[n] in [0, n_partitions)."""
    mixed = keys.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLY_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLY_2
    top = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)
    return (top * np.uint64(n_partitions) >> np.uint64(32)).astype(np.int32)


def shard_of_partition(partition: int, n_partitions: int, n_shards: int) -> int:
    """Return the shard that owns a partition. Needs n_shards <= n_partitions."""
    return partition * n_shards // n_partitions


def partitions_of_shard(shard: int, n_partitions: int, n_shards: int) -> tuple[int, ...]:
    """Return the partitions one shard owns, ascending; never none while n_shards <= n_partitions."""
    return tuple(p for p in range(n_partitions) if shard_of_partition(p, n_partitions, n_shards) == shard)


def shard_of(keys: I64, n_partitions: int, n_shards: int) -> I32:
    """Return the shard of each key: i64[n] -> i32[n] in [0, n_shards)."""
    if n_shards == 1:
        return np.zeros(keys.size, np.int32)
    partitions = partition_of(keys, n_partitions).astype(np.int64)
    return (partitions * n_shards // n_partitions).astype(np.int32)
