"""How far the activations of a ranker reach on real requests, and the INT8 scales that follow.

Three ways to choose the largest value that INT8 still tells apart (the threshold; what is beyond is clipped):
`percentile`  the 99.99 % of the magnitudes that are smallest fit (default).
`min-max`     all fit.
`entropy`     least information is lost: of all thresholds in a histogram of 2048 bins the one whose 128 levels have the
              least Kullback-Leibler divergence from it (Migacz, "8-bit inference with TensorRT", GTC 2017).
Exact zeros are left out: they are exact at every scale. Refuses calibration data that is empty, not finite, or in
which an activation is always zero. Invariant: the same requests give the same scales, in whatever batches they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.engine.precision import LEVELS, activations, as_fp16_scale, check_scales, tidied
from infra.errors import InvalidInput, ReleaseRefused

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

Method = Literal["percentile", "min-max", "entropy"]
METHODS: tuple[Method, ...] = get_args(Method)
PERCENTILE = 99.99
N_BINS = 2048
_ENTROPY_LEVELS = 128
FORMAT = 1


class Scales(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scales of one model. `steps`: activation -> what one INT8 step stands for, an FP16 number; `largest`: the
    largest magnitude seen; `calibration`: what the requests were."""

    format: int
    role: str
    method: str
    calibration: dict[str, str | int | float]
    steps: dict[str, float]
    largest: dict[str, float]

    def write(self, path: Path) -> None:
        """As JSON, for a release and for `--scales`."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Of one activation: the largest, and how many fall into each of `N_BINS` equal bins up to it, i64[N_BINS]."""

    largest: float
    counts: I64


def read_scales(path: Path) -> Scales:
    """Raises InvalidInput when the file holds no scales."""
    try:
        scales = msgspec.json.decode(path.read_bytes(), type=Scales)
    except OSError as error:
        raise InvalidInput("scales", f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidInput("scales", f"{path} holds no scales: {error}") from error
    if scales.format != FORMAT:
        raise InvalidInput("scales", f"{path}: format {scales.format}, this version reads {FORMAT}")
    check_scales(scales.steps, scales.steps)
    return scales


def calibrate(
    model: onnx.ModelProto,
    batches: Sequence[Features],
    *,
    role: str,
    method: Method = "percentile",
    calibration: Mapping[str, str | int | float],
) -> Scales:
    """Scales of the FP32 `model` on `batches` of requests (leading dimension: requests; no padding).

    Raises ReleaseRefused when the data cannot calibrate this model.
    """
    seen = magnitudes(model, batches)
    steps = {name: float(as_fp16_scale(threshold(m, method) / LEVELS)) for name, m in seen.items()}
    check_scales(steps, seen)
    return Scales(
        format=FORMAT,
        role=role,
        method=f"percentile {PERCENTILE}" if method == "percentile" else method,
        calibration=dict(calibration),
        steps=steps,
        largest={name: m.largest for name, m in seen.items()},
    )


def magnitudes(model: onnx.ModelProto, batches: Sequence[Features]) -> dict[str, Magnitudes]:
    """Of every activation that INT8 would quantise. Raises ReleaseRefused."""
    named = tidied(model)
    names = activations(named)
    if not names:
        raise ReleaseRefused("no MatMul or Gemm with a constant weight is to be quantised in this graph")
    if not any(batch.target.shape[0] * batch.target.shape[1] for batch in batches):
        raise ReleaseRefused("the calibration set holds no request with a candidate; INT8 needs real requests")
    session = _with_outputs(named, names)
    largest = dict.fromkeys(names, 0.0)
    for name, values in _observed(session, names, batches):
        if not np.isfinite(values).all():
            raise ReleaseRefused(f"{name} is not finite on a calibration request; scales from it would mean nothing")
        largest[name] = max(largest[name], float(np.abs(values).max(initial=0.0)))
    if silent := [name for name, value in largest.items() if value == 0.0]:
        raise ReleaseRefused(f"{silent[0]} is zero on every calibration request; there is nothing to scale it by")
    counts = {name: np.zeros(N_BINS, np.int64) for name in names}
    for name, values in _observed(session, names, batches):
        counts[name] += _binned(values, largest[name])
    return {name: Magnitudes(largest[name], counts[name]) for name in names}


def threshold(magnitudes: Magnitudes, method: Method) -> float:
    """The largest magnitude that is not clipped."""
    if method == "min-max":
        return magnitudes.largest
    if method == "percentile":
        return _percentile(magnitudes)
    if method == "entropy":
        return _least_divergence(magnitudes)
    raise InvalidInput("calibration_method", f"{method!r} is none; there are {', '.join(METHODS)}")


def _percentile(magnitudes: Magnitudes) -> float:
    share = np.cumsum(magnitudes.counts) / magnitudes.counts.sum()
    bins = int(np.searchsorted(share, PERCENTILE / 100)) + 1
    return magnitudes.largest * min(bins, N_BINS) / N_BINS


def _least_divergence(magnitudes: Magnitudes) -> float:
    counts = magnitudes.counts.astype(np.float64)
    kept = range(_ENTROPY_LEVELS, N_BINS + 1)
    losses = [_divergence(counts, n) for n in kept]
    return magnitudes.largest * kept[int(np.argmin(losses))] / N_BINS


def _divergence(counts: F64, n: int) -> float:
    """Divergence of the first `n` bins, with everything beyond in the last of them, from their 128 levels."""
    inside = counts[:n]
    clipped = inside.copy()
    clipped[-1] += counts[n:].sum()
    level = np.arange(n) * _ENTROPY_LEVELS // n
    held = inside > 0
    sums = np.bincount(level, inside, _ENTROPY_LEVELS)
    filled = np.maximum(np.bincount(level, held, _ENTROPY_LEVELS), 1)
    approximate = np.where(held, (sums / filled)[level], 0.0)
    if approximate.sum() == 0.0:
        return np.inf
    p, q = clipped / clipped.sum(), approximate / approximate.sum()
    if ((p > 0) & (q == 0)).any():
        return np.inf
    some = p > 0
    return float((p[some] * np.log(p[some] / q[some])).sum())


def _binned(values: F32, largest: float) -> I64:
    size = np.abs(values[values != 0])
    bins = np.minimum((size * np.float64(N_BINS / largest)).astype(np.int64), N_BINS - 1)
    return np.bincount(bins, minlength=N_BINS)


def _observed(
    session: ort.InferenceSession, names: Sequence[str], batches: Sequence[Features]
) -> Iterator[tuple[str, F32]]:
    """Every activation of every batch."""
    taken = [value.name for value in session.get_inputs()]
    computed = [name for name in names if name not in taken]
    for batch in batches:
        given: dict[str, F32] = {"hist": batch.hist, "target": batch.target, "mask": batch.mask, "user": batch.user}
        yield from ((name, given[name]) for name in names if name in taken)
        if computed:
            yield from zip(computed, session.run(computed, {name: given[name] for name in taken}), strict=True)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> ort.InferenceSession:
    """A session over the model that also gives back `names`. Raises ReleaseRefused."""
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names if name not in known
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as many kinds as ONNX Runtime has
        raise ReleaseRefused(f"ONNX Runtime cannot show the activations of this graph: {error}") from error
