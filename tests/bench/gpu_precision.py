"""`python -m tests.bench.gpu_precision DIR`: what FP16 loses on this GPU, by the engine that serves there.

DIR is what `python -m tests.bench.precision --seeds 7,8,9 --requests DIR` wrote: for each seed both rankers in FP32 and
the held-out requests of the quality gate. FP32 is scored by ONNX Runtime on the CPU; FP16 by the CUDA-graph engine, as
one kernel and operation by operation. Needs torch with CUDA and onnxruntime; no data, no Ray.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.cuda_graph import TorchSession, open_kernel_session, open_session
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.quality import compare
from infra.engine.run import Engine
from reranker.precisions import LOG_LOSS_NEGATIVES
from tests.bench.precision_requests import HeldOut, read_requests

F32 = NDArray[np.float32]


def main() -> None:
    """Score and print."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.gpu_precision", description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that it runs")
    given = options.parse_args()
    device = torch.device(given.device)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("device: PyTorch sees no CUDA device; run this on the machine with the GPU")
    print(torch.cuda.get_device_name() if given.device == "cuda" else "cpu")
    print("| seed | ranker | engine | AUC loss %: uniform | popularity | chance % | log-loss % | logit rms | top 20 |")
    print("|---" * 9 + "|")
    for file in sorted(given.folder.glob("*.npz")):
        asked = read_requests(file)
        for role in ("edge", "rerank"):
            model = given.folder / f"{file.stem}.{role}.onnx"
            fp32 = asked.scored(logits_of(OnnxEngine(model), asked))
            ways: dict[str, Callable[[Grid], TorchSession]] = {
                "cuda-kernel": partial(open_kernel_session, model, device),
                "cuda-graph": partial(open_session, model, device, half=True),
            }
            for name, opens in ways.items():
                engine = BucketedEngine(name, "fp16", opens)
                engine.load()
                found = compare(fp32, asked.scored(logits_of(engine, asked)), LOG_LOSS_NEGATIVES)
                engine.close()
                changes = list(found.by_negatives.values())
                print(
                    f"| {file.stem} | {role} | {name} | "
                    + " | ".join(f"{change.auc_loss_pct:+.4f}" for change in changes)
                    + f" | {max(change.auc_noise_pct for change in changes):.4f} "
                    f"| {max(change.log_loss_rise_pct for change in changes):+.3f} "
                    f"| {found.logit_rmse:.5f} | {found.overlap_at_20:.4f} |",
                    flush=True,
                )


def logits_of(engine: Engine, asked: HeldOut) -> F32:
    """Logits f32[R, N] of all requests."""
    logits = np.full(asked.items.shape, np.nan, np.float32)
    for rows, f in asked.batches:
        logits[rows] = engine.run(f.hist, f.target, f.mask, f.user)
    return logits


if __name__ == "__main__":
    main()
