"""The cold tier: one Redis string per row, written only over what is older.

    <prefix>:<table_id>:<key, 8 bytes>   version u64 | order u64 | dtype u8 | crc32c u32 | row bytes   (little-endian)
    <prefix>:<table_id>#floors           hash: bucket -> greatest version ever written to it, u64
    <prefix>#id                          set once; another one means that Redis lost its data
    <prefix>#gaps                        bits by partition: a shard that had lost updates wrote rows of it

`dtype` 0 is a tombstone (no row), 1 is f32. `order` is the place in the log up to which every write to the key is in
the row. A write takes effect iff (version, order) is greater than what is stored: states of one key only ever grow in
that order, so a late or repeated write, from this process, its predecessor or another replica, changes nothing. But a
replica that lost updates takes its states for whole: `#gaps` is set before the first of them is written, and read with
every row. crc32c covers the key and all else, so that a damaged row, or one under a wrong key, is not taken for one.

Every call raises RedisUnavailable, within about a second. Invariant: no row is read that was not written whole.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import crc32c
import numpy as np
from numpy.typing import NDArray

from infra.errors import RedisUnavailable
from infra.redis import connect, redis_errors
from param_server.contract import F32, I64, U64
from param_server.leaving import Departure
from param_server.routing import partition_of

N_FLOORS = 1024
ABSENT, LIVE, DELETED = 0, 1, 2
_HEAD = struct.Struct("<QQB")
_CRC = struct.Struct("<I")
_KEY = struct.Struct("<q")
_DTYPE_NONE, _DTYPE_F32 = 0, 1

# Lua has only doubles, so numbers of 64 bits are compared as two halves.
_WRITE = """
local function newer(a, b)
  local a1, a0, a3, a2 = struct.unpack('<I4I4I4I4', a)
  local b1, b0, b3, b2 = struct.unpack('<I4I4I4I4', b)
  if a0 ~= b0 then return a0 > b0 end
  if a1 ~= b1 then return a1 > b1 end
  if a2 ~= b2 then return a2 > b2 end
  return a3 > b3
end
local n = #KEYS - 2
if redis.call('GET', KEYS[n + 2]) ~= ARGV[#ARGV] then return -1 end
local written = 0
for i = 1, n do
  local old = redis.call('GETRANGE', KEYS[i], 0, 15)
  if #old < 16 or newer(ARGV[i], old) then
    redis.call('SET', KEYS[i], ARGV[i])
    written = written + 1
  end
end
local zero = string.rep('\\0', 8)
for i = n + 1, #ARGV - 1, 2 do
  local old = redis.call('HGET', KEYS[n + 1], ARGV[i])
  if not old or newer(ARGV[i + 1] .. zero, old .. zero) then
    redis.call('HSET', KEYS[n + 1], ARGV[i], ARGV[i + 1])
  end
end
return written
"""


@dataclass(frozen=True, slots=True)
class ColdRows:
    """What the cold tier holds of some keys: `found` u8[n] (ABSENT, LIVE, DELETED), versions and orders u64[n], rows
    f32[n, dim] (zeros unless LIVE)."""

    keys: I64
    found: NDArray[np.uint8]
    versions: U64
    orders: U64
    rows: F32


def encode_row(row: Departure) -> bytes:
    """The value of a row."""
    values = row.state.row
    head = _HEAD.pack(row.state.version, row.order, _DTYPE_NONE if values is None else _DTYPE_F32)
    body = b"" if values is None else values.astype("<f4").tobytes()
    return head + _CRC.pack(_checksum(row.key, head, body)) + body


def decode_rows(keys: I64, values: Sequence[bytes | None], dim: int) -> tuple[ColdRows, int]:
    """What the values say, and how many of them are damaged; those count as absent."""
    n = keys.size
    found, versions, orders = np.zeros(n, np.uint8), np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    rows = np.zeros((n, dim), np.float32)
    damaged = 0
    at = _HEAD.size + _CRC.size
    for i, (key, value) in enumerate(zip(keys.tolist(), values, strict=True)):
        if value is None:
            continue
        dtype = value[_HEAD.size - 1] if len(value) >= at else -1
        length = {_DTYPE_NONE: at, _DTYPE_F32: at + 4 * dim}.get(dtype)
        head, body = value[: _HEAD.size], value[at:]
        if len(value) != length or _CRC.unpack_from(value, _HEAD.size)[0] != _checksum(key, head, body):
            damaged += 1
            continue
        versions[i], orders[i], _ = _HEAD.unpack(head)
        found[i] = DELETED if dtype == _DTYPE_NONE else LIVE
        if dtype == _DTYPE_F32:
            rows[i] = np.frombuffer(body, "<f4")
    return ColdRows(keys, found, versions, orders, rows), damaged


def floor_of(keys: I64) -> NDArray[np.int32]:
    """Bucket of each key in the hash of floors: i64[n] -> i32[n]. Partitions are unions of neighbouring buckets."""
    return partition_of(keys, N_FLOORS)


class ColdStore:
    """All cold rows of one generation. Safe to use from several threads."""

    def __init__(self, redis_url: str, prefix: str) -> None:
        self._redis = connect(redis_url)
        self._prefix = prefix
        self._write = self._redis.register_script(_WRITE)
        self._id = b""
        self._gaps = b""
        self.damaged = 0

    def identity(self) -> str:
        """Id of the data that Redis holds; a new one where it holds none. Another than before: rows were lost.

        Reads and writes fail until it was asked for, and from the moment it changes until it is asked for again.
        """
        with redis_errors():
            self._redis.set(self._id_name, uuid.uuid4().hex, nx=True)
            identity, gaps = cast("list[Any]", self._redis.mget([self._id_name, self._gaps_name]))
        self._id, self._gaps = bytes(identity or b""), bytes(gaps or b"")
        return self._id.decode()

    def evicts(self) -> bool:
        """Whether Redis drops keys when it is full: then rows vanish from the cold tier without a word."""
        with redis_errors():
            memory: Any = self._redis.info("memory")
        return bool(memory.get("maxmemory")) and memory.get("maxmemory_policy") != "noeviction"

    def floors(self, table_id: int) -> U64:
        """Greatest version ever written, by bucket: u64[N_FLOORS]."""
        with redis_errors():
            given: Any = self._redis.hgetall(self._floors(table_id))
        floors = np.zeros(N_FLOORS, np.uint64)
        for bucket, version in given.items():
            floors[int(bucket)] = int.from_bytes(version, "little")
        return floors

    def read(self, table_id: int, keys: I64, dim: int) -> ColdRows:
        """What is stored of keys i64[n]."""
        with redis_errors():
            names = [self._key(table_id, key) for key in keys.tolist()]
            identity, gaps, *values = cast("list[Any]", self._redis.mget([self._id_name, self._gaps_name, *names]))
        self._check(identity == self._id)
        self._gaps = bytes(gaps or b"")
        rows, damaged = decode_rows(keys, values, dim)
        self.damaged += damaged
        return rows

    def has_gaps(self, partitions: Collection[int]) -> bool:
        """Whether, as of the last read or write, a shard that had lost updates wrote rows of one of these."""
        return any(_bit(self._gaps, partition) for partition in partitions)

    def write(self, table_id: int, rows: Sequence[Departure], gaps: Collection[int] = ()) -> int:
        """Store what is newer than what is there, and raise the floors; how many rows were newer. `gaps` are the
        partitions of the writer if it has lost updates."""
        if not all(_bit(self._gaps, partition) for partition in gaps):
            self._mark(gaps)
        keys = np.array([row.key for row in rows], np.int64)
        floors: dict[int, int] = {}
        for bucket, row in zip(floor_of(keys).tolist(), rows, strict=True):
            floors[bucket] = max(floors.get(bucket, 0), row.state.version)
        names = [self._key(table_id, row.key) for row in rows]
        values: list[bytes | int] = [encode_row(row) for row in rows]
        for bucket, version in floors.items():
            values += [bucket, version.to_bytes(8, "little")]
        with redis_errors():
            written = int(self._write(keys=[*names, self._floors(table_id), self._id_name], args=[*values, self._id]))
        self._check(written >= 0)
        return written

    def put_hot(self, table_id: int, index: int, n_shards: int, value: bytes) -> None:
        """Keep one shard's list of the rows that are asked for most; drop those of other numbers of shards."""
        name = f"{self._prefix}:{table_id}#hot"
        with redis_errors():
            fields: Any = self._redis.hkeys(name)
            self._redis.hset(name, f"{index}/{n_shards}", value)
            if old := [field for field in fields if not field.endswith(f"/{n_shards}".encode())]:
                self._redis.hdel(name, *old)

    def hot(self, table_id: int) -> list[bytes]:
        """The lists of all shards there were."""
        with redis_errors():
            lists: Any = self._redis.hvals(f"{self._prefix}:{table_id}#hot")
            return list(lists)

    def close(self) -> None:
        """End the connections."""
        self._redis.close()

    @property
    def _id_name(self) -> str:
        return f"{self._prefix}#id"

    @property
    def _gaps_name(self) -> str:
        return f"{self._prefix}#gaps"

    def _mark(self, gaps: Collection[int]) -> None:
        with redis_errors():
            for partition in gaps:
                self._redis.setbit(self._gaps_name, partition, 1)
            marked: Any = self._redis.get(self._gaps_name)
        self._gaps = bytes(marked or b"")

    def _check(self, same: bool) -> None:
        if not same or not self._id:
            raise RedisUnavailable("redis: it holds other data than before")

    def _key(self, table_id: int, key: int) -> bytes:
        return f"{self._prefix}:{table_id}:".encode() + _KEY.pack(key)

    def _floors(self, table_id: int) -> str:
        return f"{self._prefix}:{table_id}#floors"


def _bit(bits: bytes, at: int) -> bool:
    """As Redis counts them: from the highest bit of the first byte."""
    return at // 8 < len(bits) and bool(bits[at // 8] >> (7 - at % 8) & 1)


def _checksum(key: int, head: bytes, body: bytes) -> int:
    return int(crc32c.crc32c(body, crc32c.crc32c(head, crc32c.crc32c(_KEY.pack(key)))))
