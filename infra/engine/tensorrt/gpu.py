"""The GPU of this process by pycuda: which it is, and its primary context.

The primary context is the one that torch and the CUDA runtime use, so memory and streams are shared and no second
context takes memory or time. It is retained once and kept for the life of the process: pycuda lets go of a context only
on the thread that retained it, and replicas open and close engines on two. Refuses a machine without pycuda, driver or
GPU, with what is missing. Invariant: the context is current only inside `current()`; a thread finds its own as it was.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from infra.engine.run import EngineUnavailable
from infra.engine.tensorrt.pycuda_api import Context, Driver, GpuDevice

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
# Primary contexts of this process, by GPU.
_RETAINED: dict[int, Context] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Gpu:
    """`sm`: compute capability, 75 is 7.5; `driver`: the kernel module's version, as `nvidia-smi` shows it."""

    name: str
    sm: int
    driver: str


class Device:
    """One GPU with its primary context. What pycuda allocates in it has to be dropped inside `current()` too."""

    def __init__(self, driver: Driver, device: GpuDevice, context: Context) -> None:
        self.driver = driver
        self._device = device
        self._context = context

    def gpu(self) -> Gpu:
        """Which GPU it is."""
        major, minor = self._device.compute_capability()
        return Gpu(str(self._device.name()), 10 * major + minor, driver_version(self.driver))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The primary context on top of this thread's, for the calls inside."""
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()


def open_device(index: int = 0) -> Device:
    """The GPU of this process. Raises EngineUnavailable."""
    try:
        driver = cast(Driver, importlib.import_module("pycuda.driver"))
    except ImportError as error:
        raise EngineUnavailable(
            f"pycuda cannot be loaded ({error}): `pip install 'trirank[gpu]'` installs it"
        ) from error
    try:
        driver.init()
        device = driver.Device(index)
        with _LOCK:
            if index not in _RETAINED:
                _RETAINED[index] = device.retain_primary_context()
        return Device(driver, device, _RETAINED[index])
    except driver.Error as error:
        raise EngineUnavailable(f"there is no GPU that CUDA can use: {error}") from error


def driver_version(driver: Driver, kernel_module: Path = _KERNEL_MODULE) -> str:
    """Of the NVIDIA driver ("580.65.06"); where its kernel module does not tell, the CUDA version it implements."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", kernel_module.read_text())
    except OSError:
        found = None
    return found[1] if found else f"cuda-{driver.get_driver_version()}"
