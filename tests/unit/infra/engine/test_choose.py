from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from infra.engine.choose import Offer, choose
from infra.errors import ReleaseRefused
from tests.engines import TOKEN, USER, FormulaCheck, Fuse, offer
from tests.onnx_models import write_ranker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory.mktemp("m") / "r.onnx", TOKEN, USER)


@pytest.fixture
def check(model: Path) -> FormulaCheck:
    return FormulaCheck(model)


def chosen(
    offers: list[Offer], check: FormulaCheck, *, measured: bool = True
) -> tuple[list[str], list[str], list[str]]:
    """Names of what is opened, of what is left, and the refusals as `name cause`."""
    opened, rest, refusals = choose("edge", offers, check, measured=measured)
    return [one.offer.name for one in opened], [one.name for one in rest], [f"{r.name} {r.cause}" for r in refusals]


def test_the_first_engine_that_agrees_serves_and_the_next_stands_by(model: Path, check: FormulaCheck) -> None:
    fuses = [Fuse() for _ in range(6)]
    fuses[0].unavailable = "no driver"
    fuses[1].wrong_by = 0.5
    fuses[2].not_finite = True
    fuses[3].raises = RuntimeError("a library's own error")
    kinds = ("tensorrt", "tensorrt-rtx", "cuda-graph", "aotinductor", "onnxruntime-cpu", "torch-cpu")

    opened, rest, refusals = chosen([offer(model, f, k) for f, k in zip(fuses, kinds, strict=True)], check)

    assert opened == ["onnxruntime-cpu:fp32", "torch-cpu:fp32"]
    assert rest == []
    assert refusals == [
        "tensorrt:fp32 unavailable",
        "tensorrt-rtx:fp32 disagrees",
        "cuda-graph:fp32 failed",
        "aotinductor:fp32 failed",
    ]
    assert [fuse.closed for fuse in fuses] == [1, 1, 1, 1, 0, 0]


def test_a_file_that_is_no_model_is_damaged(tmp_path: Path, model: Path, check: FormulaCheck) -> None:
    (tmp_path / "no.onnx").write_bytes(b"no model")

    _, _, refusals = chosen(
        [offer(tmp_path / "no.onnx", Fuse(), "torch-cpu"), offer(model, Fuse(), "aotinductor")], check
    )

    assert refusals == ["torch-cpu:fp32 damaged"]


def test_an_engine_whose_package_is_not_installed_is_unavailable(model: Path, check: FormulaCheck) -> None:
    absent = Offer("tensorrt", "fp16", lambda: importlib.import_module("a_package_nobody_has"))  # type: ignore[arg-type]

    _, _, refusals = chosen([absent, offer(model, Fuse(), "onnxruntime-cpu")], check)

    assert refusals == ["tensorrt:fp16 unavailable"]


def test_a_heavy_engine_is_not_opened_to_stand_by(model: Path, check: FormulaCheck) -> None:
    heavy = Fuse()

    opened, rest, _ = chosen(
        [offer(model, Fuse(), "onnxruntime-cpu"), offer(model, heavy, "torch-cpu", heavy=True)], check
    )

    assert (opened, rest) == (["onnxruntime-cpu:fp32"], ["torch-cpu:fp32"])
    assert heavy.made == 0


def test_a_heavy_engine_serves_when_it_comes_first(model: Path, check: FormulaCheck) -> None:
    opened, rest, _ = chosen(
        [offer(model, Fuse(), "cuda-graph", heavy=True), offer(model, Fuse(), "onnxruntime-cpu")], check
    )

    assert (opened, rest) == (["cuda-graph:fp32", "onnxruntime-cpu:fp32"], [])


def test_the_fastest_of_the_cpus_engines_serves_and_the_second_fastest_stands_by(
    model: Path, check: FormulaCheck
) -> None:
    seconds = {"aotinductor": 3.0, "onnxruntime-cpu": 2.0, "torch-cpu": 1.0}
    check.seconds_of = lambda engine: seconds[engine.kind] + 0.5 * (engine.precision == "int8")
    compiled = Fuse()
    offers = [
        offer(model, compiled, "aotinductor", heavy=True),
        offer(model, Fuse(), "onnxruntime-cpu", "int8"),
        offer(model, Fuse(), "onnxruntime-cpu", "fp32"),
        offer(model, Fuse(), "torch-cpu", heavy=True),
    ]

    opened, rest, _ = chosen(offers, check)

    assert opened == ["onnxruntime-cpu:fp32", "aotinductor:fp32"]
    assert rest == ["onnxruntime-cpu:int8", "torch-cpu:fp32"]
    assert compiled.closed == 0
    assert chosen(offers, check, measured=False)[0] == ["aotinductor:fp32", "onnxruntime-cpu:int8"]


@pytest.mark.parametrize("int8_s", [0.1, 1.5])
def test_a_lower_precision_leads_only_where_it_is_named_first(model: Path, check: FormulaCheck, int8_s: float) -> None:
    check.seconds_of = lambda engine: int8_s if engine.precision == "int8" else 1.0
    offers = [offer(model, Fuse(), "onnxruntime-cpu", "int8"), offer(model, Fuse(), "onnxruntime-cpu", "fp32")]

    assert chosen(offers, check)[0] == ["onnxruntime-cpu:fp32", "onnxruntime-cpu:int8"]
    assert chosen(offers, check, measured=False)[0] == ["onnxruntime-cpu:int8", "onnxruntime-cpu:fp32"]


def test_when_no_engine_agrees_the_reasons_of_all_are_given(model: Path, check: FormulaCheck) -> None:
    wrong, absent = Fuse(), Fuse()
    wrong.wrong_by, absent.unavailable = 1.0, "no driver"

    with pytest.raises(ReleaseRefused, match=r"edge: no engine can serve: tensorrt:fp32: no driver; torch-cpu:fp"):
        choose("edge", [offer(model, absent, "tensorrt"), offer(model, wrong, "torch-cpu")], check, measured=True)
