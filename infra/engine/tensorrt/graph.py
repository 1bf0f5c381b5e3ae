"""Whether a ranker's ONNX graph can become an engine, told before a builder is asked. Pure over the graph.

Refuses inputs that are no ranker's, an opset whose Q and DQ have no FP16 scales, and, for a GPU of SM75 (T4), a product
that multiplies in FP32: TensorRT-RTX has no such kernel there, and TensorRT's is a fraction of the FP16 one's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from infra.engine.precision import MIN_OPSET
from infra.engine.precision_fp16 import float32_products
from infra.engine.run import INPUT_NAMES
from infra.errors import ReleaseRefused

NO_FP32_PRODUCTS = (75,)


def read_graph(path: Path) -> onnx.ModelProto:
    """The model. Raises ReleaseRefused when the file holds none."""
    try:
        return onnx.load(path)
    except Exception as error:
        raise ReleaseRefused(f"{path}: no ONNX model can be read from it: {error}") from error


def check_graph(model: onnx.ModelProto, name: str, sms: Sequence[int]) -> None:
    """Raises ReleaseRefused, beginning with `name`, when no engine for all of `sms` can be built from it."""
    inputs = {value.name for value in model.graph.input}
    if not inputs <= set(INPUT_NAMES) or "target" not in inputs or len(model.graph.output) != 1:
        raise ReleaseRefused(f"{name}: inputs {sorted(inputs)} are not those of a ranker {INPUT_NAMES}")
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    quantised = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    if quantised and opset < MIN_OPSET:
        raise ReleaseRefused(f"{name}: INT8 at opset {opset}; FP16 scales need {MIN_OPSET} or more: export it anew")
    refusing = sorted(set(sms) & set(NO_FP32_PRODUCTS))
    if refusing and (left := float32_products(model)):
        raise ReleaseRefused(
            f"{name}: {left[0]} multiplies in FP32 ({len(left)} products do), which SM{refusing[0]} (a T4) refuses: "
            "build from the FP16 model, or from INT8 over FP16"
        )
