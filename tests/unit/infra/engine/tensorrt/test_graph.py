"""What a builder is not even asked to build."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from infra.engine.tensorrt.graph import check_graph, read_graph
from infra.errors import ReleaseRefused
from infra.release import Precision, Role
from tests.gpu_release import models


def graph(role: Role, precision: Precision) -> onnx.ModelProto:
    return read_graph(models()[role][precision])


@pytest.mark.parametrize("role", ["edge", "rerank"])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_gpus_run_passes_for_a_t4(role: Role, precision: Precision) -> None:
    check_graph(graph(role, precision), "model", [75])


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_a_product_in_fp32_is_refused_for_a_t4_by_name_and_taken_for_newer_gpus(role: Role) -> None:
    fp32 = graph(role, "fp32")
    check_graph(fp32, "model", [80, 86, 89])
    with pytest.raises(ReleaseRefused, match=r"model: \w+ multiplies in FP32 .*SM75"):
        check_graph(fp32, "model", [75, 80])


def test_an_opset_without_fp16_scales_is_refused() -> None:
    old = graph("edge", "int8")
    old.opset_import[0].version = 17
    with pytest.raises(ReleaseRefused, match="opset 17"):
        check_graph(old, "model", [80])


def test_inputs_that_are_no_rankers_are_refused() -> None:
    other = graph("edge", "fp16")
    other.graph.input[0].name = "image"
    with pytest.raises(ReleaseRefused, match="image"):
        check_graph(other, "model", [80])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mlp.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(ReleaseRefused, match="no ONNX model"):
        read_graph(file)
