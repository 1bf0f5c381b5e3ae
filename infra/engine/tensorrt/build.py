"""From a ranker's ONNX file to a serialised engine, by TensorRT 10, TensorRT 11 or TensorRT-RTX: one code path.

Strongly typed: the types are those of the graph, no builder flag chooses a precision and nothing is calibrated here.
One optimisation profile covers every shape that serving has. Refuses what the builder refuses, with its reason.
Invariant: an engine built here takes any batch, history and candidates within `Shapes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.engine.run import EngineUnavailable
from infra.engine.store import write_whole
from infra.engine.tensorrt.api import BuilderConfig, Network, Profile, TensorRT
from infra.engine.tensorrt.messages import last_error, listener, nothing_printed
from infra.errors import ReleaseRefused

# Axes of each input, as names of `Shapes`; the last axis of `hist`, `target` and `user` is fixed by the model.
AXES = {
    "hist": ("batch", "length"),
    "mask": ("batch", "length"),
    "target": ("batch", "candidates"),
    "user": ("batch",),
}


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an engine is built for: the largest of each free axis; the smallest is 1. `usual`, of 1 request, is what its
    kernels are chosen for."""

    batch: int = 32
    length: int = 100
    candidates: int = 512
    usual: tuple[int, int, int] = (1, 50, 256)

    def limits(self) -> dict[str, int]:
        """For the engine list."""
        return {"batch": self.batch, "length": self.length, "candidates": self.candidates}

    def of(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Smallest, usual and largest shape of an input whose free axes are -1."""
        usual = dict(zip(("batch", "length", "candidates"), self.usual, strict=True))
        largest = asdict(self)
        axes = (*AXES[name], None)[: len(shape)]
        return (
            tuple(1 if axis and size < 0 else size for axis, size in zip(axes, shape, strict=True)),
            tuple(usual[axis] if axis and size < 0 else size for axis, size in zip(axes, shape, strict=True)),
            tuple(largest[axis] if axis and size < 0 else size for axis, size in zip(axes, shape, strict=True)),
        )


def build_engine(
    trt: TensorRT,
    model: bytes,
    name: str,
    *,
    sms: Sequence[int],
    timing_cache: Path | None,
    shapes: Shapes | None = None,
) -> bytes:
    """The serialised engine. `sms`: compute capabilities to compile for ahead of time (TensorRT-RTX), empty to build
    for the GPU of this machine (TensorRT). `timing_cache`: file to read and write what was measured, None for none.

    Raises ReleaseRefused when the graph cannot be built, EngineUnavailable when this machine cannot build.
    """
    told = listener(trt)
    builder = _builder(trt, told)
    # Bit of the flag: 1 in TensorRT 10, 0 in TensorRT 11 and TensorRT-RTX, where it is the only way.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, told)
    if not parser.parse(model):
        reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise ReleaseRefused(f"{name}: the parser refuses it: {'; '.join(reasons) or last_error(told)}")
    config = builder.create_builder_config()
    config.add_optimization_profile(_profile(builder.create_optimization_profile(), network, shapes or Shapes()))
    if sms:
        config.num_compute_capabilities = len(sms)
        for index, sm in enumerate(sms):
            if not config.set_compute_capability(_capability(trt, sm), index):
                raise ReleaseRefused(f"{name}: the builder does not take SM{sm}: {last_error(told)}")
    if timing_cache is not None:
        _use_timing_cache(config, timing_cache)
    with nothing_printed():
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ReleaseRefused(f"{name}: the builder refuses it: {last_error(told)}")
    if timing_cache is not None and (measured := config.get_timing_cache()) is not None:
        timing_cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(timing_cache, bytes(measured.serialize()))
    return bytes(engine)


def _builder(trt: TensorRT, told: Any) -> Any:
    try:
        return trt.Builder(told)
    except (RuntimeError, TypeError) as error:
        # The bindings raise TypeError ("factory function returned nullptr") where CUDA cannot start.
        raise EngineUnavailable(
            f"the builder does not start ({last_error(told)}): TensorRT builds on the GPU that will serve; build "
            "there, or without a GPU with --builder tensorrt-rtx"
        ) from error


def _profile(profile: Profile, network: Network, shapes: Shapes) -> Profile:
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        least, usual, most = shapes.of(tensor.name, tuple(tensor.shape))
        profile.set_shape(tensor.name, least, usual, most)
    return profile


def _capability(trt: TensorRT, sm: int) -> Any:
    try:
        return getattr(trt.ComputeCapability, f"SM{sm}")
    except AttributeError as error:
        raise ReleaseRefused(f"this version of TensorRT-RTX does not compile for SM{sm}") from error


def _use_timing_cache(config: BuilderConfig, file: Path) -> None:
    """Begin with what earlier builds measured; a cache the builder does not take is begun anew."""
    kept = config.create_timing_cache(file.read_bytes()) if file.is_file() else None
    if kept is None or not config.set_timing_cache(kept, False):
        empty = config.create_timing_cache(b"")
        if empty is not None:
            config.set_timing_cache(empty, False)
