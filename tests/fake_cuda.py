"""CUDA and TensorRT for tests on machines without a GPU: device memory is host memory, the engine is ONNX Runtime.

Work enqueued on a stream waits there, as on a GPU, until the stream is synchronised or captured; an engine reads and
writes nothing but the addresses it was given when it was enqueued. So a lane that copies too little, too early, to
another address or from a buffer that has changed gives wrong scores. What is called,
tests/unit/infra/engine/tensorrt/test_bindings.py compares with the real interfaces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import onnxruntime as ort

from infra.engine.buckets import Bucket, Grid
from infra.engine.tensorrt.api import Context
from infra.engine.tensorrt.lane import TensorRtLane
from infra.engine.tensorrt.pycuda_api import CudaStream

Work = Callable[[], None]


class FakeError(Exception):
    """pycuda's Error."""


class FakeStream:
    """Work waits in `pending` until `synchronize`; while `captured` is a list, it is recorded there instead."""

    _handles = count(1)
    by_handle: ClassVar[dict[int, FakeStream]] = {}

    def __init__(self) -> None:
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self
        self.pending: list[Work] = []
        self.captured: list[Work] | None = None

    def put(self, work: Work) -> None:
        (self.pending if self.captured is None else self.captured).append(work)

    def synchronize(self) -> None:
        assert self.captured is None, "a capturing stream cannot be waited for"
        pending, self.pending = self.pending, []
        for work in pending:
            work()


class FakeAllocation:
    """Device memory, aligned as CUDA's is."""

    def __init__(self, driver: FakeDriver, size: int) -> None:
        self._driver = driver
        self._size = size
        self._bytes = ctypes.create_string_buffer(size + 256)
        driver.allocated += size

    def __int__(self) -> int:
        return -(-ctypes.addressof(self._bytes) // 256) * 256

    def free(self) -> None:
        assert self._driver.depth > 0, "freed without a context"
        self._driver.allocated -= self._size


class FakeDriver:
    """pycuda.driver."""

    Error = FakeError
    Stream = FakeStream

    def __init__(self) -> None:
        self.depth = 0
        self.allocated = 0
        self.copied = 0

    def pagelocked_empty(self, shape: int, dtype: Any) -> np.ndarray:
        assert self.depth > 0, "allocated without a context"
        return np.full(shape, np.nan, dtype)

    def mem_alloc(self, size: int) -> FakeAllocation:
        assert self.depth > 0, "allocated without a context"
        return FakeAllocation(self, size)

    def memcpy_htod_async(self, dest: int, src: np.ndarray, stream: CudaStream) -> None:
        self._copy(stream, lambda: ctypes.memmove(dest, src.ctypes.data, src.nbytes), src.nbytes)

    def memcpy_dtoh_async(self, dest: np.ndarray, src: int, stream: CudaStream) -> None:
        self._copy(stream, lambda: ctypes.memmove(dest.ctypes.data, src, dest.nbytes), dest.nbytes)

    def _copy(self, stream: CudaStream, move: Callable[[], Any], size: int) -> None:
        def work() -> None:
            self.copied += size
            move()

        FakeStream.by_handle[stream.handle].put(work)


class FakeDevice:
    """`infra.engine.tensorrt.gpu.Device`."""

    def __init__(self) -> None:
        self.driver = FakeDriver()

    @contextmanager
    def current(self) -> Iterator[None]:
        self.driver.depth += 1
        try:
            yield
        finally:
            self.driver.depth -= 1


class FakeCapture:
    """`infra.engine.tensorrt.capture.Capture`, over fake streams."""

    def __init__(self) -> None:
        self.graphs: dict[int, list[Work]] = {}
        self.launched = 0

    def record(self, stream: int, work: Work) -> int:
        recorded: list[Work] = []
        on = FakeStream.by_handle[stream]
        on.captured = recorded
        try:
            work()
        finally:
            on.captured = None
        graph = len(self.graphs) + 1
        self.graphs[graph] = recorded
        return graph

    def launch(self, graph: int, stream: int) -> None:
        self.launched += 1
        for work in self.graphs[graph]:
            FakeStream.by_handle[stream].put(work)

    def drop(self, graph: int) -> None:
        del self.graphs[graph]


class FakeContext(Context):
    """IExecutionContext of an ONNX model."""

    def __init__(self, model: Path, largest: Bucket) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._largest = largest
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.profile: int | None = None
        self.enqueued = 0
        self.refuses = False

    @property
    def inputs(self) -> list[str]:
        return [value.name for value in self._session.get_inputs()]

    @property
    def output(self) -> str:
        return str(self._session.get_outputs()[0].name)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return stream_handle in FakeStream.by_handle

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        batch, length, candidates = self._largest.batch, self._largest.length, self._largest.candidates
        most = {"hist": (batch, length), "mask": (batch, length), "target": (batch, candidates), "user": (batch,)}[name]
        self._shapes[name] = shape
        return self.profile == 0 and all(size <= limit for size, limit in zip(shape, most, strict=False))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory % 256 == 0 or name == self.output

    def infer_shapes(self) -> list[str]:
        return [name for name in self.inputs if name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.enqueued += 1
        shapes, addresses = dict(self._shapes), dict(self._addresses)

        def work() -> None:
            given = {name: _numbers(addresses[name], shapes[name]) for name in self.inputs}
            scores = np.asarray(self._session.run(None, given)[0], np.float32)
            _numbers(addresses[self.output], scores.shape)[:] = scores

        FakeStream.by_handle[stream_handle].put(work)
        return not self.refuses


class FakeSession:
    """`infra.engine.bucketed.Session`: lanes of an ONNX model over one fake device. `largest` is what the engine was
    built for."""

    def __init__(
        self, model: Path, widths: tuple[int, int], grid: Grid, *, lanes: int = 2, largest: Bucket | None = None
    ) -> None:
        self.device, self.capture = FakeDevice(), FakeCapture()
        self.contexts = [FakeContext(model, largest or grid.largest) for _ in range(lanes)]
        self.widths = widths
        with self.device.current():
            self.lanes = [
                TensorRtLane(
                    cast(Any, self.device), context, cast(Any, self.capture), inputs=context.inputs,
                    output=context.output, widths=widths, largest=grid.largest,
                )
                for context in self.contexts
            ]  # fmt: skip

    def memory_bytes(self) -> int:
        return sum(lane.memory_bytes() for lane in self.lanes)

    def close(self) -> None:
        with self.device.current():
            for lane in self.lanes:
                lane.close()


def _numbers(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """Memory at an address as f32."""
    size = int(np.prod(shape))
    return np.frombuffer((ctypes.c_float * size).from_address(address), np.float32).reshape(shape)
