"""What producers and shards agree on: the spec of a table and EMBU, the record that carries embedding updates.

Pure: bytes in, values out. A record that is not exactly right is refused whole, with one reason of a closed set;
nothing is guessed or repaired. Golden bytes in `tests/golden/embu_v1.json` pin the format; they are never edited.

EMBU version 1, little-endian:

    magic "EMBU" | u16 format | u16 op | u32 table_id | u32 generation | u8 dtype | u8 flags | u16 dim | u32 n
    | u64 base_version | i64 event_time_us | u32 crc32c | keys i64[n] | versions u64[n] (flag 1) | rows f32[n, dim]

`crc32c` (Castagnoli) covers every other byte of the record: the 40 bytes before it, then all that follow it.
A delete carries no rows. `base_version` 0 without versions means that the log's own order counts (see `updates.py`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import crc32c
import numpy as np
from numpy.typing import NDArray

from infra.errors import Permanent

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

MAGIC = b"EMBU"
FORMAT = 1
MAX_ROWS = 65536
_HEADER = struct.Struct("<4sHHIIBBHIQqI")
_CRC_AT = _HEADER.size - 4
_DTYPE_F32 = 1
_FLAG_VERSIONS = 1

Reason = Literal[
    "truncated", "magic", "format", "op", "dtype", "flags", "empty", "too_many_rows", "length", "crc", "non_finite",
    "generation", "table", "dim", "misrouted", "table_full", "overflow",
]  # fmt: skip


class Op(IntEnum):
    """What a record does to its rows."""

    ASSIGN = 1
    ADD = 2
    DELETE = 3


class BadRecord(Permanent):
    """A record that can never be applied. Action: dead letter, with `reason`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of a generation; `capacity_rows` is per shard, `default_row` f32[dim] is answered for missing keys."""

    name: str
    table_id: int
    dim: int
    capacity_rows: int
    default_row: F32
    dtype: str = "f32"


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """One EMBU record: keys i64[n], versions u64[n] or None, rows f32[n, dim] (f32[0, dim] for a delete)."""

    op: Op
    table_id: int
    generation: int
    dim: int
    base_version: int
    event_time_us: int
    keys: I64
    versions: U64 | None
    rows: F32

    def take(self, chosen: I64) -> UpdateBatch:
        """The same record with the chosen rows only, in that order."""
        return UpdateBatch(
            self.op,
            self.table_id,
            self.generation,
            self.dim,
            self.base_version,
            self.event_time_us,
            self.keys[chosen],
            None if self.versions is None else self.versions[chosen],
            self.rows if self.op is Op.DELETE else self.rows[chosen],
        )


def encode_batch(batch: UpdateBatch) -> bytes:
    """Return the record. Raises BadRecord when its parts do not fit together or hold a non-finite number."""
    n = batch.keys.size
    _check_count(n)
    expected = (0 if batch.op is Op.DELETE else n, batch.dim)
    if batch.rows.shape != expected:
        raise BadRecord("length", f"rows have shape {batch.rows.shape}, not {expected}")
    if batch.versions is not None and batch.versions.size != n:
        raise BadRecord("length", f"{batch.versions.size} versions for {n} keys")
    _check_finite(batch.rows)
    header = _HEADER.pack(
        MAGIC,
        FORMAT,
        batch.op,
        batch.table_id,
        batch.generation,
        _DTYPE_F32,
        0 if batch.versions is None else _FLAG_VERSIONS,
        batch.dim,
        n,
        batch.base_version,
        batch.event_time_us,
        0,
    )
    body = batch.keys.astype("<i8").tobytes()
    if batch.versions is not None:
        body += batch.versions.astype("<u8").tobytes()
    body += batch.rows.astype("<f4").tobytes()
    head = header[:_CRC_AT]
    return head + struct.pack("<I", _checksum(head, body)) + body


def decode_batch(value: bytes) -> UpdateBatch:
    """Return what the record says; its arrays are copies, aligned and writable. Raises BadRecord."""
    if len(value) < _HEADER.size:
        raise BadRecord("truncated", f"{len(value)} bytes, a header has {_HEADER.size}")
    magic, form, op, table_id, generation, dtype, flags, dim, n, base_version, event_time_us, crc = _HEADER.unpack_from(
        value
    )
    if magic != MAGIC:
        raise BadRecord("magic", "the record does not begin with EMBU")
    if form != FORMAT:
        raise BadRecord("format", f"version {form}, this reader knows {FORMAT}")
    if op not in Op.__members__.values():
        raise BadRecord("op", f"operation {op}")
    if dtype != _DTYPE_F32:
        raise BadRecord("dtype", f"type {dtype}")
    if flags & ~_FLAG_VERSIONS:
        raise BadRecord("flags", f"flags {flags:#x}")
    _check_count(n)
    n_versions = n if flags & _FLAG_VERSIONS else 0
    n_rows = 0 if op == Op.DELETE else n
    length = _HEADER.size + 8 * n + 8 * n_versions + 4 * n_rows * dim
    if len(value) != length:
        raise BadRecord("length", f"{len(value)} bytes, the header asks for {length}")
    view = memoryview(value)
    if _checksum(view[:_CRC_AT], view[_HEADER.size :]) != crc:
        raise BadRecord("crc", "the checksum differs")
    versions_at = _HEADER.size + 8 * n
    rows_at = versions_at + 8 * n_versions
    rows = np.frombuffer(value, "<f4", n_rows * dim, rows_at).astype(np.float32).reshape(n_rows, dim)
    _check_finite(rows)
    return UpdateBatch(
        Op(op),
        table_id,
        generation,
        dim,
        base_version,
        event_time_us,
        np.frombuffer(value, "<i8", n, _HEADER.size).astype(np.int64),
        np.frombuffer(value, "<u8", n, versions_at).astype(np.uint64) if n_versions else None,
        rows,
    )


def _checksum(head: bytes | memoryview, body: bytes | memoryview) -> int:
    return int(crc32c.crc32c(body, crc32c.crc32c(head)))


def _check_count(n: int) -> None:
    if n == 0:
        raise BadRecord("empty", "no keys")
    if n > MAX_ROWS:
        raise BadRecord("too_many_rows", f"{n} keys, at most {MAX_ROWS} in one record")


def _check_finite(rows: F32) -> None:
    if not np.isfinite(rows).all():
        raise BadRecord("non_finite", "a row holds NaN or infinity")
