"""The part of pycuda's driver module that is used here, as types: what mypy holds our calls to.

A test compares it with pycuda's own source. Invariant: nothing else here calls pycuda.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsInt

import numpy as np
from numpy.typing import NDArray


class Context(Protocol):
    """A CUDA context; `push` and `pop` are of the calling thread."""

    def push(self) -> None: ...
    def pop(self) -> None: ...


class GpuDevice(Protocol):
    """Device."""

    def name(self) -> str: ...
    def compute_capability(self) -> tuple[int, int]: ...
    def retain_primary_context(self) -> Context: ...


class CudaStream(Protocol):
    """Stream."""

    handle: int

    def synchronize(self) -> None: ...


class DeviceAllocation(SupportsInt, Protocol):
    """Device memory; `int()` is its address."""

    def free(self) -> None: ...


class Driver(Protocol):
    """The module pycuda.driver."""

    Error: type[Exception]

    def init(self) -> None: ...
    def get_driver_version(self) -> int: ...
    def Device(self, index: int, /) -> GpuDevice: ...
    def Stream(self) -> CudaStream: ...
    def pagelocked_empty(self, shape: int, dtype: Any) -> NDArray[np.float32]: ...
    def mem_alloc(self, size: int, /) -> DeviceAllocation: ...
    def memcpy_htod_async(self, dest: int, src: NDArray[np.float32], stream: CudaStream) -> None: ...
    def memcpy_dtoh_async(self, dest: NDArray[np.float32], src: int, stream: CudaStream) -> None: ...


CLASSES: dict[str, type] = {
    "Context": Context,
    "Device": GpuDevice,
    "Stream": CudaStream,
    "DeviceAllocation": DeviceAllocation,
}
FUNCTIONS: Sequence[str] = (
    "init",
    "get_driver_version",
    "pagelocked_empty",
    "mem_alloc",
    "memcpy_htod_async",
    "memcpy_dtoh_async",
)
