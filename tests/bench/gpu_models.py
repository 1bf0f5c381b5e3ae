"""`python -m tests.bench.gpu_models`: both rankers on a GPU, beside PyTorch eager in FP32 and in the paper's form.

Needs torch with CUDA, onnx and onnxruntime; no Ray, no TensorRT, no release (random weights run as fast as trained
ones; --rerank-model and --edge-model take ONNX files of a release). `device` is the time on the GPU between two events,
copies in and out included; `run` is wall time of the engine's `run`, from numpy to numpy. Medians; the ratio is
eager's device time over the engine's. `--device cpu` runs the same code uncaptured, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

from edge_ranker.model import EdgeMLP
from infra.engine.batch import Features
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.cuda_graph import TorchLane, open_session
from infra.engine.export import export_ranker
from reranker.model import BST

TOKEN, USER = 64, 32
LENGTH = 50
# (requests, candidates): one user and a full batch, as in the targets.
SHAPES = ((1, 200), (32, 200))
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "edge": lambda: EdgeMLP(TOKEN, USER),
    "rerank": lambda: BST(TOKEN, USER, mode="full"),
}
SERVED: dict[str, Callable[[], nn.Module]] = {"edge": MAKERS["edge"], "rerank": lambda: BST(TOKEN, USER)}
# name -> half precision, compiled, exact bucket (else the grid's, padded).
ENGINES = {
    "graph fp32": (False, False, True),
    "graph fp16": (True, False, True),
    "graph fp16, padded": (True, False, False),
    "graph fp16, compiled": (True, True, True),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_models", description=__doc__)
    parser.add_argument("--edge-model", type=Path, help="ONNX file in FP32")
    parser.add_argument("--rerank-model", type=Path, help="ONNX file in FP32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reps", type=int, default=200, help="runs of each (default 200)")
    parser.add_argument("--compiled", action="store_true", help="Inductor's form as well: minutes more")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("device: PyTorch sees no CUDA device; run this on the machine with the GPU")
    torch.manual_seed(1)
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "edge": given.edge_model or exported("edge", Path(folder)),
            "rerank": given.rerank_model or exported("rerank", Path(folder)),
        }
        found = [
            line
            for role, file in files.items()
            for shape in SHAPES
            for line in measured(role, file, shape, device, given.reps, compiled=given.compiled)
        ]
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu (uncaptured; its times mean nothing)"
    print(f"{name}, torch {torch.__version__}, L = {LENGTH}, {given.reps} runs")
    print(text(found))
    print(json.dumps({"device": name, "torch": torch.__version__, "lines": found}))


def exported(role: str, folder: Path) -> Path:
    """A file with random weights."""
    export_ranker(SERVED[role](), folder / f"{role}.onnx", token_dim=TOKEN, user_dim=USER)
    return folder / f"{role}.onnx"


def measured(
    role: str, file: Path, shape: tuple[int, int], device: torch.device, reps: int, *, compiled: bool
) -> list[dict[str, float | str]]:
    """Eager first, then each engine beside it."""
    features = some(*shape)
    eager_ms, eager_bytes = eager(MAKERS[role]().to(device).eval(), features, device, reps)
    lines: list[dict[str, float | str]] = [
        line(role, shape, "eager fp32, paper's form", eager_ms, eager_ms, eager_ms, eager_bytes)
    ]
    for name, (half, fused, exact) in ENGINES.items():
        if fused and not compiled:
            continue
        grid = Grid((shape[0],), (LENGTH,), (shape[1],)) if exact else Grid()
        engine = BucketedEngine(
            "cuda-graph", "", partial(open_session, file, device, half=half, compiled=fused), grid=grid
        )
        engine.load()
        run_ms = wall_ms(partial(engine.run, features.hist, features.target, features.mask, features.user), reps)
        size = engine.memory_bytes()
        engine.close()
        device_ms = graph_ms(file, grid, features, device, reps, half=half, compiled=fused)
        lines.append(line(role, shape, name, device_ms, run_ms, eager_ms, size))
    return lines


@torch.inference_mode()
def eager(model: nn.Module, features: Features, device: torch.device, reps: int) -> tuple[float, int]:
    """Time of one forward on tensors that are on the device, and the memory at its peak with weights."""
    inputs = [torch.from_numpy(x).to(device) for x in (features.hist, features.target, features.mask, features.user)]
    model(*inputs)
    weights = sum(p.nbytes for p in model.parameters())
    if device.type != "cuda":
        return device_ms(lambda: model(*inputs), device, max(reps // 20, 3)), weights
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(*inputs)
    peak = torch.cuda.max_memory_allocated(device) - before
    return device_ms(lambda: model(*inputs), device, reps), weights + peak


def graph_ms(
    file: Path, grid: Grid, features: Features, device: torch.device, reps: int, *, half: bool, compiled: bool
) -> float:
    """Time on the device of one replay: copy in, compute, copy out."""
    session = open_session(file, device, grid, half=half, compiled=compiled)
    lane: TorchLane = session.lanes[0]
    n, length, candidates = features.hist.shape[0], features.hist.shape[1], features.target.shape[1]
    (piece,) = grid.cut(n, length, candidates)
    lane.prepare([piece.bucket])
    lane.score(piece.bucket, features)
    with torch.inference_mode():
        found = device_ms(lane.work(piece.bucket), device, reps)
    session.close()
    return found


def device_ms(work: Callable[[], object], device: torch.device, reps: int) -> float:
    """Median time between an event before and one behind; wall time without a GPU."""
    if device.type != "cuda":
        return wall_ms(work, reps)
    for _ in range(10):
        work()
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return median(times)


def wall_ms(work: Callable[[], object], reps: int) -> float:
    """Median wall time."""
    times = []
    for _ in range(reps):
        began_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - began_s) * 1e3)
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


def line(
    role: str, shape: tuple[int, int], name: str, device: float, run: float, eager_ms: float, size: int
) -> dict[str, float | str]:
    """One row."""
    return {
        "model": role,
        "users": shape[0],
        "candidates": shape[1],
        "engine": name,
        "device_us": round(device * 1e3, 1),
        "run_us": round(run * 1e3, 1),
        "times_eager": round(eager_ms / device, 1),
        "memory_mb": round(size / 1e6, 2),
    }


def text(lines: list[dict[str, float | str]]) -> str:
    """A table."""
    head = list(lines[0])
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*rows, *("| " + " | ".join(str(one[key]) for key in head) + " |" for one in lines)])


if __name__ == "__main__":
    main()
