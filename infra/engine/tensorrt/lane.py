"""One request in flight on a TensorRT engine: an execution context, a stream, pinned and device buffers, and a CUDA
graph per shape bucket.

A graph holds the copy to the GPU, the engine and the copy back; a request writes its pinned buffer, launches one graph
and waits for its stream. Refuses what CUDA or TensorRT refuse, as Permanent. Invariant: the buffers' addresses never
change while a graph lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.engine.buckets import Bucket, Layout, fill
from infra.engine.tensorrt.api import Context
from infra.engine.tensorrt.capture import Capture
from infra.engine.tensorrt.gpu import Device
from infra.errors import Permanent

F32 = NDArray[np.float32]
_NUMBER_BYTES = 4


class TensorRtLane:
    """See `infra.engine.bucketed.Lane`. `inputs` are the names the engine takes, `output` is its scores'."""

    def __init__(
        self,
        device: Device,
        context: Context,
        capture: Capture,
        *,
        inputs: Sequence[str],
        output: str,
        widths: tuple[int, int],
        largest: Bucket,
    ) -> None:
        self._device = device
        self._context = context
        self._capture = capture
        self._inputs = tuple(inputs)
        self._output = output
        self._widths = widths
        self._largest = Layout(largest, *widths)
        self._graphs: dict[Bucket, int] = {}
        self._views: dict[Bucket, Features] = {}
        self._stream: Any = None
        self._sent: F32 = np.empty(0, np.float32)
        self._received: F32 = np.empty(0, np.float32)
        self._on_gpu: Any = None
        self._scores_on_gpu: Any = None

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Allocate, and capture a graph for each bucket."""
        driver = self._device.driver
        with self._device.current():
            self._stream = driver.Stream()
            self._sent = driver.pagelocked_empty(self._largest.numbers, np.float32)
            self._sent.fill(0.0)
            self._received = driver.pagelocked_empty(self._largest.scores, np.float32)
            self._on_gpu = driver.mem_alloc(self._sent.nbytes)
            self._scores_on_gpu = driver.mem_alloc(self._received.nbytes)
            if not self._context.set_optimization_profile_async(0, self._stream.handle):
                raise Permanent("TensorRT does not take its own optimisation profile")
            for bucket in buckets:
                layout = Layout(bucket, *self._widths)
                self._views[bucket] = layout.views(self._sent)
                self._graphs[bucket] = self._recorded(layout)

    def score(self, bucket: Bucket, part: Features) -> F32:
        """See `Lane.score`."""
        fill(self._views[bucket], part)
        with self._device.current():
            try:
                self._capture.launch(self._graphs[bucket], self._stream.handle)
                self._stream.synchronize()
            except self._device.driver.Error as error:
                raise Permanent(f"CUDA: {error}") from error
        return self._received[: bucket.batch * bucket.candidates].reshape(bucket.batch, bucket.candidates)

    def memory_bytes(self) -> int:
        """Of pinned and device buffers; what the context needs, the session counts."""
        return 2 * (self._sent.nbytes + self._received.nbytes)

    def close(self) -> None:
        """Free everything; with the device's context current, because pycuda frees nothing without it."""
        for graph in self._graphs.values():
            self._capture.drop(graph)
        for buffer in (self._on_gpu, self._scores_on_gpu):
            if buffer is not None:
                buffer.free()
        self._graphs, self._views = {}, {}
        self._sent = self._received = np.empty(0, np.float32)
        self._on_gpu = self._scores_on_gpu = self._stream = None

    def _recorded(self, layout: Layout) -> int:
        """The work of a bucket as a graph. It runs once before, because TensorRT allocates and compiles in its first
        run of a shape, which a capture forbids."""
        offsets = layout.offsets()
        for name, shape in layout.shapes().items():
            if name in self._inputs:
                address = int(self._on_gpu) + offsets[name] * _NUMBER_BYTES
                taken = self._context.set_input_shape(name, shape) and self._context.set_tensor_address(name, address)
                if not taken:
                    raise Permanent(f"TensorRT does not take {name} {shape}: the engine was built for smaller shapes")
        if not self._context.set_tensor_address(self._output, int(self._scores_on_gpu)):
            raise Permanent(f"TensorRT does not take an address for {self._output}")
        if missing := self._context.infer_shapes():
            raise Permanent(f"TensorRT still wants {', '.join(missing)}")
        work = partial(self._enqueue, layout.numbers, layout.scores)
        work()
        self._stream.synchronize()
        return self._capture.record(self._stream.handle, work)

    def _enqueue(self, numbers: int, scores: int) -> None:
        driver = self._device.driver
        driver.memcpy_htod_async(int(self._on_gpu), self._sent[:numbers], self._stream)
        if not self._context.execute_async_v3(self._stream.handle):
            raise Permanent("TensorRT could not enqueue the engine")
        driver.memcpy_dtoh_async(self._received[:scores], int(self._scores_on_gpu), self._stream)
