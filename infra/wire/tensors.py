"""Tensors as frames: raw bytes, little-endian, C order, described by specs in the header.

    specs    [name, dtype code, shape] in the order of the bytes
    frames   small tensors share the first frame, each at a multiple of 8 bytes; a large one has a frame of its own

Refuses (WireProtocolError) dtypes other than bool, integers and floats, and frames longer or shorter than their specs.
Invariant: tensors picked up are C-contiguous, aligned and read-only; they are views over the received frames,
copied only when a frame is not aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.errors import WireProtocolError

MAX_TENSORS = 256
MAX_DIMENSIONS = 8
# A frame per tensor costs more than copying a small tensor next to its neighbours.
SHARED_FRAME_BYTES = 16 * 1024
_ALIGNMENT = 8

Array = NDArray[Any]
Buffer = Any  # anything with the buffer protocol: bytes, memoryview, numpy array, received frame
Spec = tuple[str, str, list[int]]

_DTYPES = {
    code: np.dtype(f"<{code}" if code[-1] != "1" else code)
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def lay_out(tensors: Mapping[str, Array]) -> tuple[list[Spec], list[Buffer]]:
    """Specs and frames: the small tensors together in one frame, then each large one alone."""
    if len(tensors) > MAX_TENSORS:
        raise WireProtocolError(f"{len(tensors)} tensors; at most {MAX_TENSORS}")
    specs: list[Spec] = []
    large: list[tuple[Spec, Array]] = []
    small: list[Buffer] = []
    for name, given in tensors.items():
        array, code = _portable(name, given)
        spec = (name, code, list(array.shape))
        if array.nbytes >= SHARED_FRAME_BYTES:
            large.append((spec, array))
            continue
        specs.append(spec)
        if array.nbytes:
            small.append(array)
            small.append(bytes(-array.nbytes % _ALIGNMENT))
    frames: list[Buffer] = [b"".join(small)] if small else []
    for spec, array in large:
        specs.append(spec)
        frames.append(array)
    return specs, frames


def _portable(name: str, given: Array) -> tuple[Array, str]:
    """The array little-endian and C-contiguous (itself when it already is), and the code of its dtype."""
    array = given if given.flags.c_contiguous else np.array(given, order="C")
    code = _CODES.get(array.dtype)
    if code is None:
        array = array.astype(array.dtype.newbyteorder("<"))
        code = _CODES.get(array.dtype)
    if code is None or array.ndim > MAX_DIMENSIONS:
        raise WireProtocolError(f"tensor {name}: {given.dtype} in {given.ndim} dimensions cannot travel")
    return array, code


def pick_up(specs: list[Spec], frames: Sequence[Buffer]) -> dict[str, Array]:
    """The tensors of a message as views over its frames."""
    if len(specs) > MAX_TENSORS:
        raise WireProtocolError(f"{len(specs)} tensors; at most {MAX_TENSORS}")
    tensors: dict[str, Array] = {}
    index, offset, size = 0, 0, 0
    for name, code, shape in specs:
        dtype = _DTYPES.get(code)
        if dtype is None or name in tensors or len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape):
            raise WireProtocolError(f"tensor {name!r} {code!r} {shape[: MAX_DIMENSIONS + 1]} is not valid")
        nbytes = dtype.itemsize * prod(shape)
        if nbytes and offset >= size:
            index, offset = index + 1, 0
            if index >= len(frames):
                raise WireProtocolError(f"tensor {name!r} has no frame")
            size = len(frames[index])
        if offset + nbytes > size and nbytes:
            raise WireProtocolError(f"tensor {name!r} is longer than its frame")
        tensors[name] = _view(name, dtype, shape, frames[index] if nbytes else b"", offset if nbytes else 0)
        offset += nbytes + -nbytes % _ALIGNMENT
    if index != len(frames) - 1 or offset < size:
        raise WireProtocolError("bytes after the last tensor")
    return tensors


def _view(name: str, dtype: np.dtype[Any], shape: list[int], frame: Buffer, offset: int) -> Array:
    try:
        array: Array = np.ndarray(shape, dtype, frame, offset)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireProtocolError(f"tensor {name!r}: {error}") from error
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array
