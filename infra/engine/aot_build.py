"""The CPU engines of a release, compiled ahead of time: what `trirank release build --targets cpu` calls.

From the FP32 ONNX file to PyTorch operations, to one exported program with free axes, to machine code by AOTInductor,
weights folded in. Built for the CPU of this machine, because the compiler is told to use all it has; another kind of
machine builds its own. Refuses to keep what does not give the ONNX file's scores. Needs torch and a C++ compiler.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from torch._inductor import aoti_compile_and_package
from torch.export import Dim, export

from infra.engine.batch import MAX_HISTORY
from infra.engine.isa import cpu_isa
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import INPUT_NAMES
from infra.engine.store import EngineEntry, EngineStore, sha256_of
from infra.engine.torch_cpu import BUILDER, AotInductorEngine, builder_version
from infra.engine.torch_graph import read_module
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import ROLES, Release, Role

MAX_BATCH, MAX_CANDIDATES = 64, 2048
TOLERANCE = 1e-4
# (batch, history length, candidates): none is the example that is exported, some are the ends.
SHAPES = ((1, 1, 1), (1, 50, 200), (3, MAX_HISTORY, 5), (16, 50, 64))
# Weights are constants: products with them can be packed when the code is made.
_CONFIG = {"freezing": True}


def build_cpu(release: Release, target: str, folder: Path, builder: str | None) -> list[Path]:
    """Compile both rankers for this machine; the files. Raises InvalidInput for another builder, ReleaseRefused when
    there is no compiler, or what it made computes something else."""
    if builder not in (None, BUILDER):
        raise InvalidInput("builder", f"{builder!r} does not build for {target}; {BUILDER} does")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ReleaseRefused(f"{target}: {BUILDER} needs a C++ compiler: install g++")
    store = EngineStore(folder)
    return [build_engine(release, role, target, store) for role in ROLES]


def build_engine(release: Release, role: Role, target: str, store: EngineStore) -> Path:
    """Compile one ranker; the file. Raises ReleaseRefused."""
    model = release.model(role)
    if model is None:
        raise ReleaseRefused(f"{release.path}: there is no FP32 model of {role}")
    token_dim, user_dim = _widths(model)
    package = _compiled(model, token_dim, user_dim)
    isa = cpu_isa()
    entry = EngineEntry(
        file=f"{role}-fp32-{target}-{isa}.pt2",
        role=role,
        precision="fp32",
        target=f"{target}-{isa}",
        builder=BUILDER,
        builder_version=builder_version(),
        sms=[],
        driver=None,
        onnx_sha256=sha256_of(model),
        sha256="",
        shapes={
            "batch": MAX_BATCH,
            "history": MAX_HISTORY,
            "candidates": MAX_CANDIDATES,
            "token": token_dim,
            "user": user_dim,
        },
    )
    with tempfile.TemporaryDirectory() as draft:
        trial = EngineStore(Path(draft))
        trial.add(entry, package)
        _compare(AotInductorEngine(trial, role, model), OnnxEngine(model), role, token_dim, user_dim)
    return store.add(entry, package)


def _widths(path: Path) -> tuple[int, int]:
    """Widths of tokens and of the user, as the graph takes them. Raises ReleaseRefused when it takes no user."""
    widths = {one.name: one.type.tensor_type.shape.dim[-1].dim_value for one in onnx.load(path).graph.input}
    if not {"target", "user"} <= widths.keys():
        raise ReleaseRefused(
            f"{path}: inputs {sorted(widths)}; a compiled engine needs all of {', '.join(INPUT_NAMES)}"
        )
    return widths["target"], widths["user"]


def _compiled(model: Path, token_dim: int, user_dim: int) -> bytes:
    """The package of code and weights."""
    batch, length = Dim("batch", min=1, max=MAX_BATCH), Dim("length", min=1, max=MAX_HISTORY)
    candidates = Dim("candidates", min=1, max=MAX_CANDIDATES)
    inputs = tuple(torch.from_numpy(array) for array in _inputs((2, 5, 7), token_dim, user_dim))
    axes = ({0: batch, 1: length}, {0: batch, 1: candidates}, {0: batch, 1: length}, {0: batch})
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        # torch walks over names of its own that it has deprecated.
        warnings.simplefilter("ignore")
        exported = export(read_module(model), inputs, dynamic_shapes=axes)
        file = aoti_compile_and_package(
            exported, package_path=str(Path(folder) / "model.pt2"), inductor_configs=dict(_CONFIG)
        )
        return Path(file).read_bytes()


def _compare(made: AotInductorEngine, given: OnnxEngine, role: str, token_dim: int, user_dim: int) -> None:
    made.load()
    given.load()
    for seed, shape in enumerate(SHAPES):
        inputs = _inputs(shape, token_dim, user_dim, seed=seed)
        difference = float(np.abs(made.run(*inputs) - given.run(*inputs)).max())
        if not difference <= TOLERANCE:
            raise ReleaseRefused(
                f"{role}: the compiled engine differs from the ONNX file by {difference:.1e} at {shape}"
            )


def _inputs(shape: tuple[int, int, int], token_dim: int, user_dim: int, *, seed: int = 0) -> list[np.ndarray]:
    """Random inputs; the first request of the batch has no history."""
    batch, length, candidates = shape
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, length), np.float32)
    mask[0] = 0.0
    return [
        rng.standard_normal((batch, length, token_dim), np.float32),
        rng.standard_normal((batch, candidates, token_dim), np.float32),
        mask,
        rng.standard_normal((batch, user_dim), np.float32),
    ]
