"""The rows that are asked for most, kept in Redis so that a shard that starts has them ready first.

Each shard writes one list per table, again and again; a shard that starts reads the lists of all shards there were and
takes what is its own. A list is a hint: it may be old or missing, and nothing is wrong but the first hits.

    <prefix>:<table_id>#hot   hash: "<index>/<n_shards>" -> keys i64[n], then counts f32[n], little-endian
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from param_server.cold import ColdStore
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


class HotSet:
    """The lists of one shard, read at its start and written again and again. `mine` says which keys are the shard's;
    `post` has work done on the cold tier, in another thread. Tables are by id."""

    def __init__(self, rows: int, mine: Callable[[I64], NDArray[np.bool_]]) -> None:
        self._rows = rows
        self._mine = mine
        self._warm_ups: dict[int, WarmUp] = {}
        self._read: deque[tuple[int, list[bytes]]] = deque()
        self.written = 0

    def take(self, table_id: int, table: TieredTable, lists: list[bytes]) -> None:
        """What the lists of a table say is known from now on; `turn` brings it up."""
        keys, counts = decode_lists(lists, self._rows)
        mine = self._mine(keys)
        table.seed(keys[mine], as_bytes(counts[mine]))
        self._warm_ups[table_id] = WarmUp(table, keys[mine][: table.capacity_rows])

    def turn(self, tables: Mapping[int, TieredTable]) -> None:
        """Take in what was read, bring up the next rows."""
        while self._read:
            table_id, lists = self._read.popleft()
            if table_id not in self._warm_ups:
                self.take(table_id, tables[table_id], lists)
        for warm_up in self._warm_ups.values():
            warm_up.turn()

    def ready(self, tables: Mapping[int, TieredTable]) -> bool:
        """Whether all that was asked for most is here."""
        return all(self.health(table_id)["state"] == "warm" for table_id in tables)

    def health(self, table_id: int) -> dict[str, Any]:
        """How far a table is."""
        warm_up = self._warm_ups.get(table_id)
        return warm_up.health() if warm_up is not None else {"state": "waiting"}

    def ask(self, tables: Mapping[int, TieredTable], post: Callable[[Callable[[ColdStore], None]], None]) -> None:
        """Have the lists read that are not known yet."""
        for table_id in tables.keys() - self._warm_ups.keys():
            post(partial(self._get, table_id))

    def write(
        self, tables: Mapping[int, TieredTable], post: Callable[[Callable[[ColdStore], None]], None], index: int,
        n_shards: int,
    ) -> None:  # fmt: skip
        """Have the lists of this shard written."""
        for table_id, table in tables.items():
            self.written += 1
            post(partial(_put, table_id, index, n_shards, encode_list(*table.hottest(self._rows))))

    def _get(self, table_id: int, store: ColdStore) -> None:
        self._read.append((table_id, store.hot(table_id)))


def _put(table_id: int, index: int, n_shards: int, value: bytes, store: ColdStore) -> None:
    store.put_hot(table_id, index, n_shards, value)
