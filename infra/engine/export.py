"""A trained ranker becomes an ONNX file that ONNX Runtime and TensorRT take.

Exported with `torch.export` (opset 20: FP16 scales of quantised graphs need 19 or more); batch, history length and
number of candidates are free axes, which engines are built for and tests run over `RANGES`; ONNX Runtime takes more.
Refuses an export whose logits differ from PyTorch's by more than `TOLERANCE` anywhere in them. Never imported while
serving: it needs torch.
"""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from infra.engine.precision import tidied
from infra.engine.run import INPUT_NAMES
from infra.errors import ReleaseRefused

OPSET = 20
TOLERANCE = 1e-4
# Smallest and largest of each axis.
RANGES = {"batch": (1, 100), "length": (1, 100), "candidates": (1, 512)}
# (batch, history length, candidates): the exporter's own example, the corners of the ranges, and shapes between.
SHAPES = (
    (2, 5, 7),
    (1, 1, 1),
    (1, 100, 512),
    (1, 100, 1),
    (1, 1, 512),
    (100, 1, 1),
    (1, 50, 200),
    (3, 100, 5),
    (16, 50, 64),
)


def export_ranker(model: nn.Module, path: Path, *, token_dim: int, user_dim: int) -> float:
    """Write `model` (hist, target, mask, user -> logits) to `path`; return the largest difference to PyTorch.

    Raises ReleaseRefused when the exported graph computes something else.
    """
    model.eval()
    batch, length, candidates = (torch.export.Dim(name) for name in ("batch", "length", "candidates"))
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            # torch walks over a name of its own that it has deprecated.
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)
            # Four inputs name one batch axis; that is meant.
            warnings.filterwarnings("ignore", message="# The axis name: .* will not be used", category=UserWarning)
            torch.onnx.export(
                model,
                _example(SHAPES[0], token_dim, user_dim, seed=0),
                path,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(INPUT_NAMES),
                output_names=["logits"],
                dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: candidates}, {0: batch, 1: length}, {0: batch}),
                external_data=False,
                verbose=False,
            )
    finally:
        exporter_log.setLevel(level)
    onnx.save(tidied(onnx.load(path)), path)
    onnx.checker.check_model(str(path))
    difference = largest_difference(model, path, token_dim=token_dim, user_dim=user_dim)
    if not difference <= TOLERANCE:
        raise ReleaseRefused(
            f"{path.name}: exported to ONNX, the model's logits differ from PyTorch's by {difference:.1e} of the "
            f"largest; up to {TOLERANCE:.0e} is rounding: look for an operation that ONNX Runtime computes otherwise"
        )
    return difference


@torch.no_grad()
def largest_difference(model: nn.Module, path: Path, *, token_dim: int, user_dim: int) -> float:
    """Largest |logit| difference between `model` and the file over all `SHAPES`, empty histories included; over the
    largest |logit| of the shape where that is above 1, since rounding grows with what is rounded."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for seed, shape in enumerate(SHAPES):
        inputs = _example(shape, token_dim, user_dim, seed=seed)
        expected = model(*inputs).numpy()
        given = {name: tensor.numpy() for name, tensor in zip(INPUT_NAMES, inputs, strict=True)}
        got = session.run(None, given)[0]
        scale = max(1.0, float(np.abs(expected).max()))
        difference = float(np.abs(got - expected).max()) / scale if got.shape == expected.shape else np.inf
        worst = max(worst, difference if np.isfinite(got).all() else np.inf)
    return worst


def _example(shape: tuple[int, int, int], token_dim: int, user_dim: int, *, seed: int) -> tuple[torch.Tensor, ...]:
    """Random inputs; the first request of the batch has no history."""
    batch, length, candidates = shape
    random = torch.Generator().manual_seed(seed)
    mask = (torch.rand(batch, length, generator=random) < 0.8).float()
    mask[0] = 0.0
    return (
        torch.randn(batch, length, token_dim, generator=random),
        torch.randn(batch, candidates, token_dim, generator=random),
        mask,
        torch.randn(batch, user_dim, generator=random),
    )
