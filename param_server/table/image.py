"""A table image: a file that holds the arrays of a `CpuTable`, to be mapped by any number of processes at once.

    0       magic "TRIIMAGE" | u32 length | u32 crc32c of the head | head (JSON), zeros up to 64 KiB
    64 KiB  slots | keys | states | versions | rows | stamps, each from a multiple of 64 KiB on, as in memory

It is written once, through a mapping, and never again: it is read by mapping it privately, so that what nobody wrote is
in memory once, whoever maps it, and a page that one process writes is copied for that process alone. What is behind the
last entry is a hole in the file and memory of the process; a hole is never mapped: a page of one can be had only
where the disk has room, and a page that cannot be had ends the process. Refuses an image of another name, size or
format, and one whose bytes are not those that were written; repairs nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import msgspec
import numpy as np

from param_server.contract import F32
from param_server.table.cpu import Arrays, CpuTable, Held, layout

# Part of every image's name. Another one whenever `layout`, the hash of `kernels_cpu.py` or this file's form changes.
FORMAT = 1
_MAGIC = b"TRIIMAGE"
_FRONT = struct.Struct("<8sII")
# Pages are 64 KiB on some processors.
_ALIGNED = 1 << 16
# The others are filled only as far as there are entries.
_WHOLE = "slots"
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
# Of Linux and the BSDs; Python does not name it.
_MAP_FIXED = 0x10


class ImageRefused(Exception):
    """An image that is not there, damaged, or somebody else's. Another one must be built."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a table of an image is made for. `default_row` is f32[dim]; it is no part of the file."""

    dim: int
    capacity_rows: int
    default_row: F32


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image says of itself. `crc32c` is of all arrays, as far as they are filled, one after the other."""

    format: int
    name: str
    dim: int
    capacity_rows: int
    used: int
    live: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where a table lies in the memory of this process, as (address, length) in bytes: what is mapped from the file,
    and what is behind the last entries."""

    of_the_file: tuple[tuple[int, int], ...]
    behind: tuple[tuple[int, int], ...]


def build(file: int, name: str, shape: Shape, n_rows: int, fill: Callable[[CpuTable], None]) -> None:
    """Write an image into an empty file, opened for reading and writing: `fill` puts at most `n_rows` rows into a
    table that lies in it. Raises OSError when there is no room; what `fill` raises goes through."""
    if not hasattr(os, "posix_fallocate"):
        raise OSError("this system cannot set room aside for a file")
    starts, size = _starts(shape)
    os.ftruncate(file, size)
    for start, length in _filled_parts(shape, n_rows):
        os.posix_fallocate(file, start, length)
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=_WRITABLE)
    table = _table(memory, shape, starts, 0, 0)
    fill(table)
    held = table.held
    if held.used > n_rows or table.stamped:
        raise ValueError(f"{held.used} rows, {n_rows} were said; a table of an image is not captured")
    head = Head(FORMAT, name, shape.dim, shape.capacity_rows, held.used, held.live, _checksum(held))
    raw = msgspec.json.encode(head)
    memory[: _FRONT.size + len(raw)] = _FRONT.pack(_MAGIC, len(raw), crc32c.crc32c(raw)) + raw


def load(path: Path, name: str, shape: Shape) -> tuple[CpuTable, Span]:
    """A table over a private mapping of an image, and where it lies. Every filled byte is read and compared.

    Raises ImageRefused with the reason, OSError when it cannot be mapped."""
    starts, size = _starts(shape)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise ImageRefused("it is not there") from error
    try:
        about = os.fstat(file)
        if about.st_uid != os.geteuid():
            raise ImageRefused(f"it belongs to user {about.st_uid}")
        if about.st_size != size:
            raise ImageRefused(f"it is damaged: {about.st_size} bytes, not {size}")
        head = _read_head(file)
        wanted = (FORMAT, name, shape.dim, shape.capacity_rows)
        if (head.format, head.name, head.dim, head.capacity_rows) != wanted:
            raise ImageRefused("it is another table's")
        if not 0 <= head.live <= head.used <= shape.capacity_rows:
            raise ImageRefused("it is damaged: its counts cannot be")
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_WRITABLE)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        parts = list(_filled_parts(shape, head.used))
        for start, length in parts:
            _map_over(address + start, file, start, length)
    finally:
        os.close(file)
    table = _table(memory, shape, starts, head.used, head.live)
    if _checksum(table.held) != head.crc32c:
        raise ImageRefused("it is damaged: its checksum differs")
    ends = [*(start for start, _ in parts[1:]), size]
    return table, Span(
        tuple((address + start, length) for start, length in parts),
        tuple((address + start + n, end - start - n) for (start, n), end in zip(parts, ends, strict=True)),
    )


def _map_over(address: int, file: int, start: int, length: int) -> None:
    """Put a private mapping of a part of the file in the place of memory that Python has mapped, and will unmap."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if libc.mmap(address, length, _WRITABLE, mmap.MAP_PRIVATE | _MAP_FIXED, file, start) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _read_head(file: int) -> Head:
    front = os.pread(file, _ALIGNED, 0)
    magic, length, crc = _FRONT.unpack_from(front)
    raw = front[_FRONT.size : _FRONT.size + length]
    if magic != _MAGIC or crc32c.crc32c(raw) != crc:
        raise ImageRefused("it is damaged: its head is not one")
    try:
        return msgspec.json.decode(raw, type=Head)
    except msgspec.DecodeError as error:
        raise ImageRefused(f"it is damaged: {error}") from error


def _starts(shape: Shape) -> tuple[Mapping[str, int], int]:
    """Where each array begins, and the size of the file."""
    starts, at = {}, _ALIGNED
    for name, (dtype, dims) in layout(shape.capacity_rows, shape.dim).items():
        starts[name] = at
        size = int(np.prod(dims)) * dtype.itemsize
        at += -(-size // _ALIGNED) * _ALIGNED
    return starts, at


def _filled_parts(shape: Shape, n_rows: int) -> Iterator[tuple[int, int]]:
    """Where the file is not a hole, in whole steps of the alignment: (start, length) in bytes."""
    yield 0, _ALIGNED
    starts, _ = _starts(shape)
    for name, (dtype, dims) in layout(shape.capacity_rows, shape.dim).items():
        n = dims[0] if name == _WHOLE else min(n_rows, dims[0])
        size = int(n * np.prod(dims[1:], dtype=np.int64)) * dtype.itemsize
        if size:
            yield starts[name], -(-size // _ALIGNED) * _ALIGNED


def _table(memory: mmap.mmap, shape: Shape, starts: Mapping[str, int], used: int, live: int) -> CpuTable:
    arrays = {
        name: np.frombuffer(memory, dtype, int(np.prod(dims)), starts[name]).reshape(dims)
        for name, (dtype, dims) in layout(shape.capacity_rows, shape.dim).items()
    }
    held = Held(Arrays(**arrays), used, live)
    return CpuTable(dim=shape.dim, capacity_rows=shape.capacity_rows, default_row=shape.default_row, held=held)


def _checksum(held: Held) -> int:
    crc = 0
    for part in _filled(held):
        crc = crc32c.crc32c(part, crc)
    return crc


def _filled(held: Held) -> Iterator[memoryview]:
    arrays: dict[str, np.ndarray[Any, Any]] = held.arrays._asdict()
    for name, array in arrays.items():
        filled = array if name == _WHOLE else array[: held.used]
        if filled.size:
            yield filled.reshape(-1).view(np.uint8).data
