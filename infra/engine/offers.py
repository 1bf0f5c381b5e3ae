"""The engines that can be tried for one ranker of one release, in order.

Knows how each kind is made and where its file lies; imports what runs it only when it is made. Refuses nothing: an
engine that is not built, or not for this machine, says so itself when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from infra.engine.choose import Offer
from infra.engine.names import full_names
from infra.engine.nvidia import require_driver
from infra.engine.run import Engine, EngineUnavailable
from infra.release import Precision, Release, Role

# Of a release and the folder of its engines, a role and a precision.
Maker = Callable[[Release, Path, Role, str], Engine]
# An engine's precision is that of a release's model, but for ONNX Runtime's INT8, which is "int8-cpu".
_FOR_GPUS: dict[str, Precision] = {"int8": "int8", "fp16": "fp16"}


def engine_folder(release: Path) -> Path:
    """Where the engines of a release lie unless a setting says otherwise."""
    return release.with_name(f"{release.name}.engines")


def offers_of(release: Release, folder: Path, role: Role, names: Sequence[str] = ()) -> list[Offer]:
    """The engines that `names` (`kind` or `kind:precision`) stand for, in order; of no name, all there are."""
    found = []
    for name in full_names(names):
        kind, _, precision = name.partition(":")
        make, heavy = MAKERS[kind]
        found.append(Offer(kind, precision, partial(make, release, folder, role, precision), heavy))
    return found


def _tensorrt(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    require_driver()
    from infra.engine.tensorrt.run import tensorrt_engine

    return tensorrt_engine("tensorrt", release, folder, role, _FOR_GPUS[precision])


def _tensorrt_rtx(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    require_driver()
    from infra.engine.tensorrt.run import tensorrt_engine

    return tensorrt_engine("tensorrt-rtx", release, folder, role, _FOR_GPUS[precision])


def _cuda_graph(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    require_driver()
    from infra.engine.cuda_graph import cuda_graph_engine

    _model(release, role, "fp32")
    return cuda_graph_engine(release, folder, role, precision)


def _cuda_kernel(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    require_driver()
    from infra.engine.cuda_graph import cuda_kernel_engine

    _model(release, role, "fp32")
    return cuda_kernel_engine(release, role)


def _onnxruntime_cpu(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    from infra.engine.onnx_cpu import OnnxEngine

    return OnnxEngine(_model(release, role, "int8-cpu" if precision == "int8" else "fp32"), precision=precision)


def _aotinductor(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    from infra.engine.store import EngineStore
    from infra.engine.torch_cpu import AotInductorEngine

    return AotInductorEngine(EngineStore(folder), role, _model(release, role, "fp32"))


def _torch_cpu(release: Release, folder: Path, role: Role, precision: str) -> Engine:
    from infra.engine.torch_cpu import TorchCpuEngine

    return TorchCpuEngine(_model(release, role, "fp32"))


def _model(release: Release, role: Role, precision: Precision) -> Path:
    """The file, as the manifest knows it. Raises EngineUnavailable without one, ReleaseRefused when it is damaged."""
    path = release.sound_model(role, precision)
    if path is None:
        raise EngineUnavailable(f"the release has no {precision} model of {role}; `trirank release show` says why")
    return path


# Kind -> how it is made, and whether opening it is heavy.
MAKERS: dict[str, tuple[Maker, bool]] = {
    "tensorrt": (_tensorrt, True),
    "tensorrt-rtx": (_tensorrt_rtx, True),
    "cuda-kernel": (_cuda_kernel, True),
    "cuda-graph": (_cuda_graph, True),
    "aotinductor": (_aotinductor, True),
    "onnxruntime-cpu": (_onnxruntime_cpu, False),
    "torch-cpu": (_torch_cpu, True),
}
