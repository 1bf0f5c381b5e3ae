"""Between numpy and the device: where tables live, and copies that wait only when the result is needed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from infra.errors import ConfigurationError


def device_of_process() -> torch.device:
    """The current GPU, or the CPU under Triton's interpreter. Raises ConfigurationError when there is neither."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    built = torch.version.cuda
    why = f"PyTorch (CUDA {built}) finds no GPU it can use" if built else "this PyTorch is built without CUDA"
    raise ConfigurationError(
        f"shard_device: {why}; see nvidia-smi and the PyTorch that is installed, or set shard_device to cpu "
        "(TRITON_INTERPRET=1 tries GPU tables without one, slowly)"
    )


def to_device(values: NDArray[Any], kind: DTypeLike, device: torch.device) -> Tensor:
    """A copy on the device, ready for the current stream. u64 and u32 become signed numbers of the same bits."""
    plain = np.require(values, kind, ["C", "A", "W"])
    if plain.dtype.kind == "u" and plain.itemsize > 1:
        plain = plain.view(f"i{plain.itemsize}")
    host = torch.from_numpy(plain)
    if device.type == "cpu":
        return host.clone()
    # The pinned copy is kept from reuse until the stream has read it.
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Copies of tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._copies = [tensor.clone() for tensor in tensors]
            return
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[NDArray[Any]]:
        """The copies."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


def to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Copies as numpy arrays; waits once for all of them."""
    return Fetch(tensors).wait()
