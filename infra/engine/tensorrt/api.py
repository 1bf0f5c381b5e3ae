"""The part of TensorRT's Python bindings that is used here, as types: what mypy holds our calls to.

TensorRT 10, TensorRT 11 and TensorRT-RTX have all of it, except what says otherwise. The bindings carry no types of
their own; a test compares every method and attribute here, by name and arguments, with what each of the three says of
itself. Refuses a package that is not installed or cannot be loaded. Invariant: nothing else here calls the bindings.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from typing_extensions import Buffer

from infra.engine.run import EngineUnavailable
from infra.engine.tensorrt.targets import Builder as BuilderName

MODULES: dict[BuilderName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_EXTRAS: dict[BuilderName, str] = {"tensorrt": "gpu", "tensorrt-rtx": "rtx"}


class Tensor(Protocol):
    """ITensor: an input or output of a network."""

    name: str
    shape: Sequence[int]


class Network(Protocol):
    """INetworkDefinition."""

    num_inputs: int

    def get_input(self, index: int, /) -> Tensor: ...


class Profile(Protocol):
    """IOptimizationProfile: the range of each free axis."""

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None: ...


class TimingCache(Protocol):
    """ITimingCache."""

    def serialize(self) -> Buffer: ...


class BuilderConfig(Protocol):
    """IBuilderConfig. The compute capabilities are TensorRT-RTX's alone."""

    num_compute_capabilities: int

    def add_optimization_profile(self, profile: Profile) -> int: ...
    def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache | None: ...
    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool: ...
    def get_timing_cache(self) -> TimingCache | None: ...
    def set_compute_capability(self, compute_capability: Any, index: int) -> bool: ...


class Builder(Protocol):
    """Builder."""

    def create_network(self, flags: int) -> Network: ...
    def create_builder_config(self) -> BuilderConfig: ...
    def create_optimization_profile(self) -> Profile: ...
    def build_serialized_network(self, network: Network, config: BuilderConfig) -> Buffer | None: ...


class ParserError(Protocol):
    """IParserError."""

    def desc(self) -> str: ...


class OnnxParser(Protocol):
    """OnnxParser."""

    num_errors: int

    def parse(self, model: bytes) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...


class RuntimeConfig(Protocol):
    """IRuntimeConfig of TensorRT-RTX: when kernels are compiled for a shape."""

    dynamic_shapes_kernel_specialization_strategy: Any


class Context(Protocol):
    """IExecutionContext: used by one thread at a time, on one stream."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...


class CudaEngine(Protocol):
    """ICudaEngine."""

    num_io_tensors: int
    device_memory_size_v2: int

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> Any: ...
    def get_tensor_dtype(self, name: str) -> Any: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def create_execution_context(self, *config: RuntimeConfig) -> Context | None: ...
    def create_runtime_config(self) -> RuntimeConfig: ...


class Runtime(Protocol):
    """Runtime."""

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> CudaEngine | None: ...


class TensorRT(Protocol):
    """The module: `tensorrt` or `tensorrt_rtx`. Enumerations are taken as they come."""

    __version__: str
    ILogger: Any
    NetworkDefinitionCreationFlag: Any
    DataType: Any
    TensorIOMode: Any
    ComputeCapability: Any
    DynamicShapesKernelSpecializationStrategy: Any

    def Builder(self, logger: Any) -> Builder: ...
    def OnnxParser(self, network: Network, logger: Any) -> OnnxParser: ...
    def Runtime(self, logger: Any) -> Runtime: ...


# Which class of the bindings each protocol stands for.
CLASSES: dict[str, type] = {
    "ITensor": Tensor,
    "INetworkDefinition": Network,
    "IOptimizationProfile": Profile,
    "ITimingCache": TimingCache,
    "IBuilderConfig": BuilderConfig,
    "Builder": Builder,
    "ParserError": ParserError,
    "OnnxParser": OnnxParser,
    "IRuntimeConfig": RuntimeConfig,
    "IExecutionContext": Context,
    "ICudaEngine": CudaEngine,
    "Runtime": Runtime,
}


def load(builder: BuilderName) -> TensorRT:
    """The module. Raises EngineUnavailable that says what to install."""
    try:
        return cast(TensorRT, importlib.import_module(MODULES[builder]))
    except ImportError as error:
        raise EngineUnavailable(
            f"{builder} cannot be loaded ({error}): `pip install 'trirank[{_EXTRAS[builder]}]'` installs it"
        ) from error


def version(builder: BuilderName) -> str:
    """Of the installed package. Raises EngineUnavailable."""
    return load(builder).__version__
