"""Whether this machine has an NVIDIA driver, told in a millisecond and without importing torch or TensorRT.

Refuses nothing else: which GPU there is, and whether it works, its engines find out.
"""

from __future__ import annotations

import ctypes

from infra.engine.run import EngineUnavailable

LIBRARY = "libcuda.so.1"


def require_driver(library: str = LIBRARY) -> None:
    """Raises EngineUnavailable on a machine without the driver's library."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise EngineUnavailable(f"this machine has no NVIDIA driver ({library} cannot be loaded)") from error
