"""One request in flight on a TensorRT engine: an execution context, a stream, pinned and device buffers, and a CUDA
graph per shape bucket.

A graph holds the copy to the GPU, the engine and the copy back; a request writes its pinned buffer, launches one graph
and waits for its stream. Refuses what CUDA or TensorRT refuse, as Permanent. Invariant: the buffers' addresses never
change while a graph lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.engine.buckets import Bucket, Layout, fill
from infra.engine.tensorrt.api import Context
from infra.engine.tensorrt.capture import Capture
from infra.engine.tensorrt.gpu import Device
from infra.engine.tensorrt.pycuda_api import CudaStream, DeviceAllocation, Driver
from infra.errors import Permanent

F32 = NDArray[np.float32]
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Buffers:
    """Pinned host memory (`sent`, `received`) and device memory of one lane, and its stream."""

    stream: CudaStream
    sent: F32
    received: F32
    inputs: DeviceAllocation
    scores: DeviceAllocation

    @staticmethod
    def allocate(driver: Driver, most: Layout) -> Buffers:
        """For every bucket up to `most`."""
        sent = driver.pagelocked_empty(most.numbers, np.float32)
        sent.fill(0.0)
        received = driver.pagelocked_empty(most.scores, np.float32)
        return Buffers(
            driver.Stream(), sent, received, driver.mem_alloc(sent.nbytes), driver.mem_alloc(received.nbytes)
        )


class TensorRtLane:
    """See `infra.engine.bucketed.Lane`. `inputs` are the names the engine takes, `output` is its scores'. Made and
    closed with the device's context current, because pycuda neither allocates nor frees without it."""

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
        self._buffers = Buffers.allocate(device.driver, Layout(largest, *widths))
        self._graphs: dict[Bucket, int] = {}
        self._views: dict[Bucket, Features] = {}

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Capture a graph for each bucket."""
        with self._device.current():
            if not self._context.set_optimization_profile_async(0, self._buffers.stream.handle):
                raise Permanent("TensorRT does not take its own optimisation profile")
            for bucket in buckets:
                layout = Layout(bucket, *self._widths)
                self._views[bucket] = layout.views(self._buffers.sent)
                self._graphs[bucket] = self._recorded(layout)

    def score(self, bucket: Bucket, part: Features) -> F32:
        """See `Lane.score`."""
        fill(self._views[bucket], part)
        stream = self._buffers.stream
        with self._device.current():
            try:
                self._capture.launch(self._graphs[bucket], stream.handle)
                stream.synchronize()
            except self._device.driver.Error as error:
                raise Permanent(f"CUDA: {error}") from error
        return self._buffers.received[: bucket.batch * bucket.candidates].reshape(bucket.batch, bucket.candidates)

    def memory_bytes(self) -> int:
        """Of pinned and device buffers; what the context needs, the session counts."""
        return 2 * (self._buffers.sent.nbytes + self._buffers.received.nbytes)

    def close(self) -> None:
        """Free graphs and device memory; pinned memory and the stream go with the lane."""
        for graph in self._graphs.values():
            self._capture.drop(graph)
        self._graphs, self._views = {}, {}
        self._buffers.inputs.free()
        self._buffers.scores.free()

    def _recorded(self, layout: Layout) -> int:
        """The work of a bucket as a graph. It runs once before, because TensorRT allocates and compiles in its first
        run of a shape, which a capture forbids."""
        context, stream = self._context, self._buffers.stream
        offsets = layout.offsets()
        for name, shape in layout.shapes().items():
            if name in self._inputs:
                address = int(self._buffers.inputs) + offsets[name] * _NUMBER_BYTES
                if not (context.set_input_shape(name, shape) and context.set_tensor_address(name, address)):
                    raise Permanent(f"TensorRT does not take {name} {shape}: the engine was built for smaller shapes")
        if not context.set_tensor_address(self._output, int(self._buffers.scores)):
            raise Permanent(f"TensorRT does not take an address for {self._output}")
        if missing := context.infer_shapes():
            raise Permanent(f"TensorRT still wants {', '.join(missing)}")
        work = partial(self._enqueue, layout.numbers, layout.scores)
        work()
        stream.synchronize()
        return self._capture.record(stream.handle, work)

    def _enqueue(self, numbers: int, scores: int) -> None:
        driver, buffers = self._device.driver, self._buffers
        driver.memcpy_htod_async(int(buffers.inputs), buffers.sent[:numbers], buffers.stream)
        if not self._context.execute_async_v3(buffers.stream.handle):
            raise Permanent("TensorRT could not enqueue the engine")
        driver.memcpy_dtoh_async(buffers.received[:scores], int(buffers.scores), buffers.stream)
