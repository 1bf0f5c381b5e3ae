from __future__ import annotations

import pytest

from infra.engine.names import KINDS, check_names, full_names, on_gpu


def test_no_names_stand_for_every_engine_in_the_order_they_are_tried() -> None:
    everything = full_names(())

    assert len(everything) == sum(len(precisions) for precisions in KINDS.values()) == len(set(everything))
    assert everything[0] == "tensorrt:int8"
    assert everything[-3:] == ["onnxruntime-cpu:int8", "onnxruntime-cpu:fp32", "torch-cpu:fp32"]


def test_a_kind_stands_for_its_precisions_and_an_engine_is_tried_once() -> None:
    assert full_names(["torch-cpu", "onnxruntime-cpu:fp32", "onnxruntime-cpu"]) == [
        "torch-cpu:fp32",
        "onnxruntime-cpu:fp32",
        "onnxruntime-cpu:int8",
    ]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["onnx"], "'onnx'; there are tensorrt"),
        (["onnxruntime-cpu:fp16"], "no precision 'fp16'; it has int8, fp32"),
        (["torch-cpu", "torch-cpu"], "'torch-cpu' is named twice"),
        ([""], "no engine ''"),
    ],
)
def test_a_name_no_engine_has_is_refused_with_those_there_are(names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_names(names)


def test_a_gpu_is_wanted_unless_only_engines_of_the_cpu_are_named() -> None:
    assert on_gpu(())
    assert on_gpu(["torch-cpu", "cuda-graph:fp16"])
    assert not on_gpu(["onnxruntime-cpu", "torch-cpu:fp32"])
