"""The TensorRT runner on a real GPU with a PyTorch module in TensorRT's place: everything but `execute_async_v3`.

`TorchContext` stands for an IExecutionContext: what it enqueues is the module's work on the stream it is given, reading
and writing the addresses it was given. Context, memory, copies, streams, captures and replays are pycuda's and the
driver's own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infra.engine.buckets import Grid
from infra.engine.nvidia import LIBRARY
from infra.engine.tensorrt.api import Context
from infra.engine.tensorrt.capture import Capture
from infra.engine.tensorrt.gpu import open_device
from infra.engine.tensorrt.lane import TensorRtLane

INPUTS = ("hist", "target", "mask", "user")


class _At:
    """Device memory at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (address, False), "version": 3}


class TorchContext(Context):
    """A module that takes and gives FP32. Its own memory lies in a pool of its own, as long as the context lives: a
    graph that was captured outside PyTorch writes there at every replay."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._pool = torch.cuda.MemPool()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        return profile_index == 0 and stream_handle != 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory % 16 == 0

    def infer_shapes(self) -> list[str]:
        return [name for name in INPUTS if name not in self._shapes]

    @torch.inference_mode()
    def execute_async_v3(self, stream_handle: int) -> bool:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_handle)), torch.cuda.use_mem_pool(self._pool):
            given = [self._tensor(name, self._shapes[name]) for name in INPUTS]
            logits = self._module(*given)
            self._tensor("logits", (math.prod(logits.shape),)).copy_(logits.reshape(-1))
        return True

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.as_tensor(_At(self._addresses[name], shape), device="cuda")


class TorchContexts:
    """`infra.engine.bucketed.Session`: lanes of the TensorRT runner over contexts of one module."""

    def __init__(self, module: nn.Module, widths: tuple[int, int], grid: Grid, lanes: int = 2) -> None:
        # PyTorch makes the primary context if nobody has yet; the runner retains the same one.
        torch.cuda.init()
        self.widths = widths
        self._device = open_device()
        capture: Any = Capture(ctypes.CDLL(LIBRARY))
        with self._device.current():
            self.lanes: Sequence[TensorRtLane] = [
                TensorRtLane(
                    self._device,
                    TorchContext(module),
                    capture,
                    inputs=INPUTS,
                    output="logits",
                    widths=widths,
                    largest=grid.largest,
                )
                for _ in range(lanes)
            ]

    def memory_bytes(self) -> int:
        return sum(lane.memory_bytes() for lane in self.lanes)

    def close(self) -> None:
        with self._device.current():
            for lane in self.lanes:
                lane.close()
            self.lanes = ()
