"""The memory of one table on a GPU, and the way back from a word of the index to its key.

Arrays lie beside each other at the same slot (`kernels.py` has the layout of a word). Tables of one dim and type can
share an arena: one allocation, of which each owns a range of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Dtype = Literal["f32", "f16", "bf16", "i8"]

LANES = 8
# The bucket must imply the ten bits of the key that a word has no room for.
FEWEST_BUCKETS = 1024
MOST_BUCKETS = 2**28
MOST_DIM = 512

_TYPES: dict[Dtype, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
}
_LOW_BITS = (1 << 54) - 1
_UNMULTIPLY_1 = pow(0xFF51AFD7ED558CCD, -1, 1 << 64)
_UNMULTIPLY_2 = pow(0xC4CEB9FE1A85EC53, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class Arrays:
    """words i64, records i64[slots, 2], rows [slots, dim], scales f32 (rows of bytes only), own_stamps i32 (evicting
    tables only) of n_buckets * 8 slots."""

    n_buckets: int
    words: Tensor
    records: Tensor
    rows: Tensor
    scales: Tensor | None
    own_stamps: Tensor | None = None

    @property
    def versions(self) -> Tensor:
        """The bits of u64, every second number of the records."""
        return self.records[:, 0]

    @property
    def marks(self) -> Tensor:
        """Which position of which batch wrote here last, i32; every fourth half of the records."""
        return self.records.view(torch.int32)[:, 2]

    @property
    def scores(self) -> Tensor:
        """The bits of u32: whose is least leaves an evicting table."""
        return self.records.view(torch.int32)[:, 3]

    @property
    def stamps(self) -> Tensor:
        """When each entry changed (`kernels_capture.py`), i32: in place of the scores where there are none."""
        return self.scores if self.own_stamps is None else self.own_stamps

    @property
    def stamp_stride(self) -> int:
        """Numbers of 32 bits from stamp to stamp."""
        return 4 if self.own_stamps is None else 1

    @property
    def n_slots(self) -> int:
        """Places for a row."""
        return self.n_buckets * LANES

    @property
    def bytes(self) -> int:
        """Memory of all arrays."""
        parts = (self.words, self.records, self.rows, self.scales, self.own_stamps)
        return sum(part.nbytes for part in parts if part is not None)


def buckets_for(slots: int) -> int:
    """The least number of buckets that has so many slots, is not below the fewest, and is a prime."""
    n = max(FEWEST_BUCKETS, -(-slots // LANES)) | 1
    while any(n % d == 0 for d in range(3, int(n**0.5) + 1, 2)):
        n += 2
    if n > MOST_BUCKETS:
        raise ValueError(f"{slots} slots are more than the {MOST_BUCKETS * LANES} that a table can have")
    return n


def bytes_for(slots: int, dim: int, *, evicting: bool) -> int:
    """Memory of a table of f32 rows with at least so many slots."""
    return buckets_for(slots) * LANES * (8 + 16 + 4 * dim + (4 if evicting else 0))


def slots_within(budget_bytes: int, dim: int, *, evicting: bool) -> int:
    """Slots of the largest table of f32 rows that takes no more memory than that; the fewest there can be at least."""
    slots = budget_bytes // (8 + 16 + 4 * dim + (4 if evicting else 0))
    while slots > FEWEST_BUCKETS * LANES and bytes_for(slots, dim, evicting=evicting) > budget_bytes:
        # The next prime is above: go down by more than the gaps between primes.
        slots -= max(LANES, slots // 1000)
    return max(slots, FEWEST_BUCKETS * LANES)


def carve(
    buckets: Sequence[int], dim: int, dtype: Dtype, device: torch.device, *, evicting: bool = False
) -> list[Arrays]:
    """One allocation per array for tables of so many buckets each; the tables share nothing but that."""
    if not 1 <= dim <= MOST_DIM:
        raise ValueError(f"dim is {dim}, it must be in [1, {MOST_DIM}]")
    slots = sum(buckets) * LANES
    words = torch.zeros(slots, dtype=torch.int64, device=device)
    records = torch.zeros((slots, 2), dtype=torch.int64, device=device)
    rows = torch.empty((slots, dim), dtype=_TYPES[dtype], device=device)
    scales = torch.zeros(slots, dtype=torch.float32, device=device) if dtype == "i8" else None
    stamps = torch.zeros(slots, dtype=torch.int32, device=device) if evicting else None
    tables = []
    end = 0
    for n in buckets:
        part = slice(end, end + n * LANES)
        end = part.stop
        own_scales = None if scales is None else scales[part]
        own_stamps = None if stamps is None else stamps[part]
        tables.append(Arrays(n, words[part], records[part], rows[part], own_scales, own_stamps))
    return tables


def keys_of(words: Tensor, slots: Tensor, n_buckets: int) -> Tensor:
    """The keys i64 of words i64 that lie at slots i64: the inverse of `mix` and `home_of`."""
    low = words & _LOW_BITS
    step = 1 + ((low & 0xFFFFFFFF) * (n_buckets - 1) >> 32)
    home = (slots // LANES - (words >> 54 & 0xFF) * step) % n_buckets
    # The high half of h is the one number that ends in the 22 bits we have and falls into the home bucket.
    least = ((home << 32) + n_buckets - 1) // n_buckets
    ending = low >> 32
    high = (least >> 22 << 22) | ending
    high = torch.where(high < least, high + (1 << 22), high)
    h = (high << 32) | (low & 0xFFFFFFFF)
    h = _fold(h) * _signed(_UNMULTIPLY_2)
    h = _fold(h) * _signed(_UNMULTIPLY_1)
    return _fold(h)


def _fold(h: Tensor) -> Tensor:
    # x ^ (x >>> 33) is its own inverse.
    return h ^ (h >> 33 & ((1 << 31) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
