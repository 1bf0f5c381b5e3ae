"""Raw id -> 64-bit key, and user -> bucket. Pure and frozen.

Keys are stored in tables, snapshots, Kafka and Redis, so the function may never change: golden vectors in
`tests/golden/hashing.json` pin it. `196` and `"196"` are the same id.

Hash: XXH3-64, seed 0 (Yann Collet, https://xxhash.com), over `namespace + NUL + id` in UTF-8, read as a signed
64-bit integer. Every bit pattern is a legal key. With n ids the chance of any collision is about n^2 / 2^65.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

HASH_NAME = "xxh3_64/namespace-nul-id/v1"

USER = "user"
ITEM = "item"
ATTRIBUTE = "attribute"
CATEGORY = "category"
_BUCKET = "bucket"

RawId = str | int


def key_of(namespace: str, raw: RawId) -> int:
    """Return the signed 64-bit key of one id."""
    unsigned = xxhash.xxh3_64_intdigest(f"{namespace}\0{raw}".encode())
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def keys_of(namespace: str, raws: Iterable[RawId]) -> NDArray[np.int64]:
    """Return the keys of many ids, int64[n]."""
    digest = xxhash.xxh3_64_intdigest
    prefix = f"{namespace}\0"
    unsigned = np.fromiter((digest(f"{prefix}{raw}".encode()) for raw in raws), np.uint64)
    return unsigned.view(np.int64)


def bucket_of(user: RawId, n_buckets: int) -> int:
    """Return the bucket of a user who has no row of his own, in [0, n_buckets)."""
    digest = xxhash.xxh3_64_intdigest(f"{_BUCKET}\0{user}".encode())
    return int(digest) * n_buckets >> 64
