"""The GPU engines of a release for one target: what `trirank release build` calls.

Builds every precision the release has for GPUs (INT8 over FP16, and FP16) of both rankers. Refuses a target the builder
cannot build for, a machine that lacks what the builder needs, and a graph the target would refuse; nothing is written
then. Invariant: every engine that is written is listed with the ONNX file it was built from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.engine.nvidia import require_driver
from infra.engine.run import EngineUnavailable
from infra.engine.store import EngineEntry, EngineStore, sha256_of
from infra.engine.tensorrt import api
from infra.engine.tensorrt.build import Shapes, build_engine
from infra.engine.tensorrt.gpu import open_device
from infra.engine.tensorrt.graph import check_graph, read_graph
from infra.engine.tensorrt.targets import Builder, check_builder, target_sms, usual_builder
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import ROLES, Precision, Release, Role

GPU_PRECISIONS: tuple[Precision, ...] = ("int8", "fp16")
EXTENSION: dict[Builder, str] = {"tensorrt": "plan", "tensorrt-rtx": "rtx"}


@dataclass(frozen=True, slots=True)
class Model:
    """One ONNX file of a release."""

    role: Role
    precision: Precision
    path: Path


def build_target(release: Release, target: str, folder: Path, builder: str | None) -> list[Path]:
    """Build all engines of `target` into `folder`, but those that are there and still fit; the files of all. Raises
    InvalidInput, ReleaseRefused or EngineUnavailable."""
    chosen = usual_builder(target) if builder is None else check_builder(builder)
    sms = target_sms(target, chosen)
    models = gpu_models(release)
    for model in models:
        check_graph(read_graph(model.path), model.path.name, sms)
    if chosen == "tensorrt":
        _require_gpu(target)
    trt = api.load(chosen)
    driver = None if chosen == "tensorrt-rtx" else _driver_here(target, sms)
    store = EngineStore(folder)
    cache = _cache(store, chosen, trt.__version__, sms)
    waiting: list[tuple[EngineEntry, bytes]] = []
    paths = []
    for model in models:
        entry = EngineEntry(
            file=f"{model.role}-{model.precision}-{target}.{EXTENSION[chosen]}",
            role=model.role,
            precision=model.precision,
            target=target,
            builder=chosen,
            builder_version=trt.__version__,
            sms=list(sms),
            driver=driver,
            onnx_sha256=sha256_of(model.path),
            sha256="",
            shapes=Shapes().limits(),
        )
        paths.append(folder / entry.file)
        if store.built(entry) is None:
            ahead = _ahead(chosen, sms)
            onnx = model.path.read_bytes()
            waiting.append((entry, build_engine(trt, onnx, model.path.name, sms=ahead, timing_cache=cache)))
    for entry, engine in waiting:
        store.add(entry, engine)
    return paths


def gpu_models(release: Release) -> list[Model]:
    """The models of both rankers that GPUs run. Raises ReleaseRefused when a ranker has none."""
    found = []
    for role in ROLES:
        of_role = [Model(role, p, path) for p in GPU_PRECISIONS if (path := release.model(role, p)) is not None]
        if not of_role:
            raise ReleaseRefused(
                f"{release.path}: the release has no FP16 and no INT8 model of {role} (its report under "
                '"precisions" says why, or it was made before there were any): train it again'
            )
        found += of_role
    return found


def _require_gpu(target: str) -> None:
    """Raises EngineUnavailable, before anything heavy is loaded, on a machine that cannot have the target's GPU."""
    try:
        require_driver()
    except EngineUnavailable as error:
        raise EngineUnavailable(
            f"tensorrt measures on the GPU it builds for, and {error}: run this command on a machine with {target}, or "
            "here with --builder tensorrt-rtx, which needs no GPU"
        ) from error


def _driver_here(target: str, sms: Sequence[int]) -> str:
    """The driver of this machine's GPU. Raises InvalidInput when it is not the target's."""
    gpu = open_device().gpu()
    if gpu.sm not in sms:
        raise InvalidInput(
            "targets",
            f"this machine has a {gpu.name} (SM{gpu.sm}); tensorrt builds for {target} (SM{sms[0]}) only on one: run "
            "this command there, or build with --builder tensorrt-rtx",
        )
    return gpu.driver


def _ahead(builder: Builder, sms: Sequence[int]) -> Sequence[int]:
    return sms if builder == "tensorrt-rtx" else ()


def _cache(store: EngineStore, builder: Builder, version: str, sms: Sequence[int]) -> Path | None:
    """TensorRT-RTX measures nothing while it builds."""
    return store.timing_cache(builder, version, sms[0]) if builder == "tensorrt" else None
