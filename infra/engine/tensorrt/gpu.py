"""The GPU of this process by pycuda: which it is, and its primary context.

The primary context is the one that torch and the CUDA runtime use, so memory and streams are shared and no second
context takes memory or time. Refuses a machine without pycuda, driver or GPU, with what is missing. Invariant: the
context is current only inside `current()`; threads of others find theirs as it was.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.engine.run import EngineUnavailable

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """`sm`: compute capability, 75 is 7.5; `driver`: the kernel module's version, as `nvidia-smi` shows it."""

    name: str
    sm: int
    driver: str


class Device:
    """One GPU with its primary context retained until `close`."""

    def __init__(self, driver: Any, device: Any) -> None:
        self.driver = driver
        self._device = device
        self._context: Any = None

    def gpu(self) -> Gpu:
        """Which GPU it is."""
        major, minor = self._device.compute_capability()
        return Gpu(str(self._device.name()), 10 * major + minor, driver_version(self.driver))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The primary context on top of this thread's, for the calls inside."""
        if self._context is None:
            self._context = self._device.retain_primary_context()
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()

    def close(self) -> None:
        """Let the primary context go; whoever else retains it keeps it."""
        if self._context is not None:
            self._context.detach()
            self._context = None


def open_device(index: int = 0) -> Device:
    """The GPU of this process. Raises EngineUnavailable."""
    try:
        driver: Any = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise EngineUnavailable(
            f"pycuda cannot be loaded ({error}): `pip install 'trirank[gpu]'` installs it"
        ) from error
    try:
        driver.init()
        return Device(driver, driver.Device(index))
    except driver.Error as error:
        raise EngineUnavailable(f"there is no GPU that CUDA can use: {error}") from error


def driver_version(driver: Any, kernel_module: Path = _KERNEL_MODULE) -> str:
    """Of the NVIDIA driver ("580.65.06"); where its kernel module does not tell, the CUDA version it implements."""
    try:
        found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", kernel_module.read_text())
    except OSError:
        found = None
    return found[1] if found else f"cuda-{driver.get_driver_version()}"
