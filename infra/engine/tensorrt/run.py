"""A built engine of TensorRT or TensorRT-RTX, run without torch: the package, pycuda and numpy are all it imports.

The engine comes from the release's engine folder and only when it was built from this release's ONNX file, by this
version of the package, for this GPU and under this driver. Refuses everything else with the reason. Invariant: contexts
are made of one engine and used by one lane each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.nvidia import LIBRARY, require_driver
from infra.engine.run import INPUT_NAMES, EngineUnavailable
from infra.engine.store import EngineStore
from infra.engine.tensorrt import api
from infra.engine.tensorrt.capture import Capture
from infra.engine.tensorrt.gpu import Device, open_device
from infra.engine.tensorrt.lane import TensorRtLane
from infra.engine.tensorrt.messages import last_error, listener
from infra.engine.tensorrt.targets import Builder
from infra.errors import ReleaseRefused
from infra.release import Precision, Release, Role

# Requests on the GPU at once in one replica.
LANES = 2


def tensorrt_engine(
    builder: Builder, release: Release, folder: Path, role: Role, precision: Precision
) -> BucketedEngine:
    """The engine of a role in "int8" or "fp16"; it loads when asked to."""
    return BucketedEngine(builder, precision, partial(open_session, builder, release, folder, role, precision))


def open_session(
    builder: Builder, release: Release, folder: Path, role: Role, precision: Precision, grid: Grid
) -> TensorRtSession:
    """The engine on this machine's GPU. Raises EngineUnavailable, or ReleaseRefused when it is no ranker."""
    onnx = release.model(role, precision)
    if onnx is None:
        raise EngineUnavailable(f"the release has no {precision} model of {role}; its quality report says why")
    require_driver()
    trt = api.load(builder)
    device = open_device()
    gpu = device.gpu()
    _, plan = EngineStore(folder).find(
        role=role,
        precision=precision,
        builder=builder,
        version=trt.__version__,
        sm=gpu.sm,
        driver=gpu.driver,
        onnx=onnx,
    )
    with device.current():
        return TensorRtSession(trt, plan, device, Capture(ctypes.CDLL(LIBRARY)), grid)


class TensorRtSession:
    """A deserialised engine with its lanes. Made with the device's context current."""

    def __init__(self, trt: api.TensorRT, plan: bytes, device: Device, capture: Capture, grid: Grid) -> None:
        told = listener(trt)
        self._device = device
        # The runtime has to outlive its engine.
        self._runtime: api.Runtime | None = trt.Runtime(told)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineUnavailable(f"the engine cannot be opened: {last_error(told)}; build it again")
        inputs, output = ranker_tensors(trt, engine)
        self.widths = _width(engine, "target"), _width(engine, "user") if "user" in inputs else 0
        self._bytes = len(plan) + LANES * int(engine.device_memory_size_v2)
        self._engine: api.CudaEngine | None = engine
        self.lanes: Sequence[TensorRtLane] = [
            TensorRtLane(
                device,
                _context(trt, engine, told),
                capture,
                inputs=inputs,
                output=output,
                widths=self.widths,
                largest=grid.largest,
            )
            for _ in range(LANES)
        ]

    def memory_bytes(self) -> int:
        """Of the engine (about its file), what its contexts need, and buffers."""
        return self._bytes + sum(lane.memory_bytes() for lane in self.lanes)

    def close(self) -> None:
        """Lanes, then the engine, then its runtime."""
        with self._device.current():
            for lane in self.lanes:
                lane.close()
            self.lanes = ()
            self._engine = None
            self._runtime = None


def ranker_tensors(trt: api.TensorRT, engine: api.CudaEngine) -> tuple[list[str], str]:
    """Names of the inputs and of the output. Raises ReleaseRefused unless they are a ranker's, in FP32."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    outputs = [name for name in names if name not in inputs]
    if not set(inputs) <= set(INPUT_NAMES) or "target" not in inputs or len(outputs) != 1:
        raise ReleaseRefused(f"the engine's inputs {inputs} and outputs {outputs} are not those of a ranker")
    if other := [name for name in names if engine.get_tensor_dtype(name) != trt.DataType.FLOAT]:
        raise ReleaseRefused(f"the engine's {other[0]} is not FP32; callers give and take FP32")
    return inputs, outputs[0]


def _width(engine: api.CudaEngine, name: str) -> int:
    return int(tuple(engine.get_tensor_shape(name))[-1])


def _context(trt: api.TensorRT, engine: api.CudaEngine, told: Any) -> api.Context:
    """TensorRT-RTX compiles for a shape when it first sees it; it must finish that before a capture begins."""
    strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        context = engine.create_execution_context()
    else:
        config = engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        context = engine.create_execution_context(config)
    if context is None:
        raise EngineUnavailable(f"no execution context: {last_error(told)}")
    return context
