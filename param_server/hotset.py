"""The rows that are asked for most, kept in Redis so that a shard that starts has them ready first.

Each shard writes one list per table, again and again; a shard that starts reads the lists of all shards there were and
takes what is its own. A list is a hint: it may be old or missing, and nothing is wrong but the first hits.

    <prefix>:<table_id>#hot   hash: "<index>/<n_shards>" -> keys i64[n], then counts f32[n], little-endian
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32, I64
from param_server.tiers import TieredTable

_ENTRY_BYTES = 12
_AT_ONCE = 1024


def encode_list(keys: I64, counts: F32) -> bytes:
    """The value of a list."""
    return keys.astype("<i8").tobytes() + counts.astype("<f4").tobytes()


def decode_lists(lists: Sequence[bytes], n: int) -> tuple[I64, F32]:
    """The `n` keys of greatest count of all lists, each once, greatest first. What is no list is passed over."""
    whole = [value for value in lists if len(value) % _ENTRY_BYTES == 0]
    keys = [np.frombuffer(value, "<i8", len(value) // _ENTRY_BYTES) for value in whole]
    counts = [np.frombuffer(value, "<f4", k.size, 8 * k.size) for value, k in zip(whole, keys, strict=True)]
    if not whole:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    every_key, every_count = np.concatenate(keys).astype(np.int64), np.concatenate(counts).astype(np.float32)
    order = np.argsort(-every_count, kind="stable")
    first = np.sort(np.unique(every_key[order], return_index=True)[1])[:n]
    return every_key[order][first], every_count[order][first]


def as_bytes(counts: F32) -> NDArray[np.uint8]:
    """Counts for a sketch."""
    capped: NDArray[np.uint8] = np.clip(np.nan_to_num(counts), 1, 255).astype(np.uint8)
    return capped


class WarmUp:
    """Brings the rows of a list up, most wanted first, a part in each turn."""

    def __init__(self, table: TieredTable, keys: I64) -> None:
        self._table = table
        self._keys = keys
        self._asked = 0
        self.state: Literal["warming", "warm"] = "warming"

    def turn(self) -> None:
        """Ask for the next part once the one before has arrived."""
        if self.state == "warm" or self._table.asked:
            return
        if self._asked >= self._keys.size:
            self.state = "warm"
            return
        self._table.fetch(self._keys[self._asked : self._asked + _AT_ONCE])
        self._asked = min(self._asked + _AT_ONCE, self._keys.size)

    def health(self) -> dict[str, Any]:
        """How far it is."""
        return {"state": self.state, "rows": int(self._keys.size), "asked": self._asked}
