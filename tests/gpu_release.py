"""A release whose rankers are the real architectures, with random weights, in every precision that GPUs run."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import onnx

from feature_service.schema import TABLE_IDS
from infra.engine.precision import activations, tidied, to_int8
from infra.engine.precision_fp16 import to_fp16
from infra.release import Precision, Release, Role, write_release
from tests.quantised_models import exported
from tests.tiny_release import SCHEMA, items, tables

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


@cache
def models() -> Mapping[Role, Mapping[Precision, Path]]:
    """ONNX files of both rankers: FP32, FP16, INT8 over FP16."""
    folder = Path(mkdtemp(prefix="trirank-gpu-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found: dict[Role, dict[Precision, Path]] = {"edge": {}, "rerank": {}}
    for role, files in found.items():
        fp32 = exported(role)
        quantised = to_int8(fp32, dict.fromkeys(activations(tidied(fp32)), 0.04))
        made: dict[Precision, onnx.ModelProto] = {"fp32": fp32, "fp16": to_fp16(fp32), "int8": to_fp16(quantised)}
        for precision, model in made.items():
            files[precision] = folder / f"{role}.{precision}.onnx"
            onnx.save(model, files[precision])
    return found


def write_gpu_release(path: Path, precisions: tuple[Precision, ...] = PRECISIONS) -> Release:
    """Write it, with these precisions of both rankers; it has no recorded requests."""
    return write_release(
        path,
        name=path.name,
        parent=None,
        created_us=1,
        schema=asdict(SCHEMA),
        schema_fingerprint=SCHEMA.fingerprint(),
        tables={table: (TABLE_IDS[table], values) for table, values in tables().items()},
        models={role: {p: files[p] for p in precisions} for role, files in models().items()},
        catalogue=items(),
        users=[],
        requests=[],
        report={},
        made_with={},
    )
