"""`python -m tests.bench.gpu_models`: both rankers on a GPU, beside PyTorch eager in FP32 and in the paper's form.

Needs torch with CUDA, onnx and onnxruntime; no Ray, no TensorRT, no release (random weights run as fast as trained
ones; --rerank-model and --edge-model take ONNX files of a release). Medians, in microseconds:
compute  the forward alone on the GPU, inputs there, under a CUDA graph; eager: launched as PyTorch does
device   copies in and out included, one replay between two events
run      wall time of the engine's `run`, from numpy to numpy
`times_eager` is eager's forward over `compute`, `times_with_copies` over `device`. `memory` is that on the GPU of
weights, inputs and activations, with as many requests in flight as the engine has lanes (eager: as many forwards at
their peak). With pycuda the TensorRT runner is measured too, the fused ranker in the engine's place. Then every bucket
of the default grid: time to load, memory. `--device cpu` runs the same code uncaptured, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_ranker.model import EdgeMLP
from infra.engine.batch import Features
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.cuda_graph import LANES, TorchSession, open_kernel_session, open_session
from infra.engine.export import export_ranker
from reranker.model import BST

TOKEN, USER = 64, 32
LENGTH = 50
# (requests, candidates): one user and a full batch, as in the targets.
SHAPES = ((1, 200), (32, 200))
PAPERS: dict[str, Callable[[], nn.Module]] = {
    "edge": lambda: EdgeMLP(TOKEN, USER),
    "rerank": lambda: BST(TOKEN, USER, mode="full"),
}
SERVED: dict[str, Callable[[], nn.Module]] = {"edge": PAPERS["edge"], "rerank": lambda: BST(TOKEN, USER)}


@dataclass(frozen=True)
class Variant:
    """How the engine runs a model; `exact`: a bucket of exactly the request's shape, else the grid's, padded."""

    name: str
    half: bool = True
    fuse: bool = False
    compiled: bool = False
    exact: bool = True


VARIANTS = (
    Variant("graph fp32, operations", half=False),
    Variant("graph fp16, operations"),
    Variant("graph fp16, Inductor", compiled=True),
    Variant("graph fp16, one kernel", fuse=True),
    Variant("graph fp16, one kernel, padded", fuse=True, exact=False),
)


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    model: str
    users: int
    candidates: int
    engine: str
    compute_us: float
    device_us: float
    run_us: float
    times_eager: float
    times_with_copies: float
    memory_mb: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_models", description=__doc__)
    parser.add_argument("--edge-model", type=Path, help="ONNX file in FP32")
    parser.add_argument("--rerank-model", type=Path, help="ONNX file in FP32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reps", type=int, default=300, help="runs of each (default 300)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--compiled", action="store_true", help="Inductor's form as well: minutes more")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("device: PyTorch sees no CUDA device; run this on the machine with the GPU")
    torch.manual_seed(1)
    device = torch.device(given.device)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    variants = [variant for variant in VARIANTS if given.compiled or not variant.compiled]
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "edge": given.edge_model or exported("edge", Path(folder)),
            "rerank": given.rerank_model or exported("rerank", Path(folder)),
        }
        lines = [
            line
            for role, file in files.items()
            for shape in SHAPES
            for line in measured(role, file, shape, device, given.reps, variants)
        ]
        loaded_ones = [variant for variant in variants if variant.exact and not variant.compiled]
        loads = [loaded(role, file, device, variant) for role, file in files.items() for variant in loaded_ones]
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu (uncaptured; its times mean nothing)"
    print(f"{name}, torch {torch.__version__}, L = {LENGTH}, {given.reps} runs")
    print(table([asdict(line) for line in lines]))
    print(f"all {len(Grid().buckets())} buckets on both lanes:")
    print(table(loads))
    if given.json:
        everything = {"device": name, "torch": torch.__version__, "lines": [asdict(x) for x in lines], "loads": loads}
        given.json.write_text(json.dumps(everything, indent=2))


def exported(role: str, folder: Path) -> Path:
    """A file with random weights."""
    export_ranker(SERVED[role](), folder / f"{role}.onnx", token_dim=TOKEN, user_dim=USER)
    return folder / f"{role}.onnx"


def measured(
    role: str, file: Path, shape: tuple[int, int], device: torch.device, reps: int, variants: list[Variant]
) -> list[Line]:
    """Eager first, then each engine beside it."""
    features = some(*shape)
    eager_us, eager_bytes = eager(PAPERS[role]().to(device).eval(), features, device, reps)

    def line(name: str, compute: float, on_device: float, run: float, size: int) -> Line:
        ratios = (round(eager_us / us, 1) for us in (compute, on_device))
        return Line(
            role, *shape, name, *(round(us, 1) for us in (compute, on_device, run)), *ratios, round(size / 1e6, 2)
        )

    lines = [line("eager fp32, paper's form", eager_us, eager_us, eager_us, eager_bytes)]
    grid = Grid((shape[0],), (LENGTH,), (shape[1],))
    for variant in variants:
        opens = opening(file, device, variant)
        used = grid if variant.exact else Grid()
        lines.append(line(variant.name, *engine_us(opens, used, features, device, reps)))
    if device.type == "cuda" and importlib.util.find_spec("pycuda") is not None:
        from tests.torch_context import TorchContexts

        module = opening(file, device, VARIANTS[3])(grid).module
        engine = BucketedEngine("tensorrt", "", lambda g: TorchContexts(module, (TOKEN, USER), g), grid=grid)
        run = run_us(engine, features, reps)
        compute = compute_us(module, features, torch.float32, device, reps)
        lines.append(line("TensorRT's runner (pycuda), one kernel", compute, float("nan"), run, engine.memory_bytes()))
        engine.close()
    return lines


def opening(file: Path, device: torch.device, variant: Variant) -> Callable[[Grid], TorchSession]:
    """Opens a session of a variant."""
    if variant.fuse:
        return partial(open_kernel_session, file, device)
    return partial(open_session, file, device, half=variant.half, compiled=variant.compiled)


def engine_us(
    opens: Callable[[Grid], Any], grid: Grid, features: Features, device: torch.device, reps: int
) -> tuple[float, float, float, int]:
    """compute, device, run, and bytes held on the GPU by one lane of that bucket."""
    n, length, candidates = features.hist.shape[0], features.hist.shape[1], features.target.shape[1]
    (piece,) = grid.cut(n, length, candidates)
    one = Grid((piece.bucket.batch,), (piece.bucket.length,), (piece.bucket.candidates,))
    engine = BucketedEngine("cuda-graph", "", opens, grid=one)
    run = run_us(engine, features, reps)
    engine.close()
    session = opens(one)
    for lane in session.lanes:
        lane.prepare([piece.bucket])
    # Pinned memory is the host's.
    taken = session.memory_bytes() - sum(lane.pinned_bytes() for lane in session.lanes)
    lane = session.lanes[0]
    lane.score(piece.bucket, features)
    with torch.inference_mode():
        on_device = device_us(lane.work(piece.bucket), device, reps)
    compute = compute_us(session.module, features, session.kind, device, reps)
    session.close()
    return compute, on_device, run, taken


def held(device: torch.device) -> int:
    """Bytes that tensors and graphs hold on the GPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


@torch.inference_mode()
def compute_us(module: nn.Module, features: Features, kind: torch.dtype, device: torch.device, reps: int) -> float:
    """The forward alone, replayed."""
    inputs = [
        torch.from_numpy(x).to(device, kind) for x in (features.hist, features.target, features.mask, features.user)
    ]
    if device.type != "cuda":
        return device_us(lambda: module(*inputs), device, reps)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        module(*inputs)
    return device_us(graph.replay, device, reps)


@torch.inference_mode()
def eager(model: nn.Module, features: Features, device: torch.device, reps: int) -> tuple[float, int]:
    """Time of one forward on tensors that are on the device, and the memory at its peak with weights."""
    inputs = [torch.from_numpy(x).to(device) for x in (features.hist, features.target, features.mask, features.user)]
    model(*inputs)
    weights = sum(p.nbytes for p in model.parameters())
    if device.type != "cuda":
        return device_us(lambda: model(*inputs), device, max(reps // 20, 3)), weights
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(*inputs)
    peak = torch.cuda.max_memory_allocated(device) - before
    given = sum(x.nbytes for x in inputs)
    return device_us(lambda: model(*inputs), device, reps), weights + LANES * (given + peak)


def loaded(role: str, file: Path, device: torch.device, variant: Variant) -> dict[str, Any]:
    """What all buckets take when a replica starts."""
    engine = BucketedEngine("cuda-graph", "", opening(file, device, variant))
    before = held(device)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    began_s = time.perf_counter()
    engine.load()
    took_s = time.perf_counter() - began_s
    tensors = held(device) - before
    whole = free - torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    engine.close()
    return {
        "model": role,
        "engine": variant.name,
        "load_s": round(took_s, 2),
        "tensors_mb": round(tensors / 1e6, 1),
        "gpu_mb": round(whole / 1e6, 1),
    }


def device_us(work: Callable[[], object], device: torch.device, reps: int) -> float:
    """Median time between an event before and one behind; wall time without a GPU."""
    if device.type != "cuda":
        return wall_us(work, reps)
    for _ in range(20):
        work()
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return median(times)


def run_us(engine: BucketedEngine, features: Features, reps: int) -> float:
    """Median wall time of `run`."""
    work = partial(engine.run, features.hist, features.target, features.mask, features.user)
    for _ in range(min(20, reps)):
        work()
    return wall_us(work, reps)


def wall_us(work: Callable[[], object], reps: int) -> float:
    """Median wall time."""
    times = []
    for _ in range(reps):
        began_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - began_s) * 1e6)
    return median(times)


def some(batch: int, candidates: int) -> Features:
    """Random requests."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return Features(
        normal(batch, LENGTH, TOKEN),
        normal(batch, candidates, TOKEN),
        np.ones((batch, LENGTH), np.float32),
        normal(batch, USER),
    )


def table(lines: list[dict[str, Any]]) -> str:
    """Of Markdown."""
    head = list(lines[0])
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*rows, *("| " + " | ".join(str(one[key]) for key in head) + " |" for one in lines)])


if __name__ == "__main__":
    main()
