"""Builders: TensorRT-RTX for real, for every SM; the ranges of the free axes; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.engine.tensorrt.api import TensorRT, load
from infra.engine.tensorrt.build import Shapes, build_engine
from infra.errors import ReleaseRefused
from infra.release import Precision, Role
from tests.gpu_release import models

ROLES: tuple[Role, ...] = ("edge", "rerank")
SMS = (75, 80, 86, 89)


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for Linux and Windows on x86-64 only")
    return load("tensorrt-rtx")


def build(rtx: TensorRT, role: Role, precision: Precision, sms: tuple[int, ...]) -> bytes:
    file = models()[role][precision]
    return build_engine(rtx, file.read_bytes(), file.name, sms=sms, timing_cache=None)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("role", ROLES)
def test_an_engine_is_built_for_every_sm(rtx: TensorRT, role: Role, precision: Precision, sm: int) -> None:
    assert len(build(rtx, role, precision, (sm,))) > models()[role][precision].stat().st_size


@pytest.mark.parametrize("role", ROLES)
def test_sm75_refuses_fp32_products_by_itself_and_the_reason_is_passed_on(rtx: TensorRT, role: Role) -> None:
    with pytest.raises(ReleaseRefused, match=r"Turing \(SM75\): FP32 GEMM is not supported"):
        build(rtx, role, "fp32", (75,))


def test_fp32_is_built_where_the_gpu_has_such_products(rtx: TensorRT) -> None:
    assert build(rtx, "edge", "fp32", (86,))


def test_one_engine_is_built_for_several_sms(rtx: TensorRT) -> None:
    assert build(rtx, "edge", "int8", (75, 80, 86, 89, 120))


# TensorRT-RTX measures nothing: its caches are empty, and it says so. The calls are TensorRT's.
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
@pytest.mark.parametrize("kept", [None, b"", b"no timing cache"])
def test_a_timing_cache_is_written_for_the_next_build_and_a_damaged_one_begun_anew(
    rtx: TensorRT, tmp_path: Path, kept: bytes | None
) -> None:
    file, cache = models()["edge"]["fp16"], tmp_path / "engines" / "timing"
    if kept is not None:
        cache.parent.mkdir()
        cache.write_bytes(kept)
    engine = build_engine(rtx, file.read_bytes(), file.name, sms=(86,), timing_cache=cache)
    assert engine
    written = cache.read_bytes()
    assert written not in (b"", kept)
    assert build_engine(rtx, file.read_bytes(), file.name, sms=(86,), timing_cache=cache)
    assert cache.read_bytes() == written


def test_nothing_is_printed_while_an_engine_is_built(rtx: TensorRT, capfd: pytest.CaptureFixture[str]) -> None:
    build(rtx, "edge", "fp16", (86,))
    print("the command's own line")
    assert capfd.readouterr().out == "the command's own line\n"


def test_an_sm_that_the_builder_does_not_know_is_refused(rtx: TensorRT) -> None:
    with pytest.raises(ReleaseRefused, match="SM90"):
        build(rtx, "edge", "fp16", (90,))


def test_what_the_parser_refuses_is_refused_with_its_reason(rtx: TensorRT) -> None:
    with pytest.raises(ReleaseRefused, match=r"broken\.onnx: the parser refuses it: "):
        build_engine(rtx, b"no model", "broken.onnx", sms=(75,), timing_cache=None)


def test_a_range_that_the_builder_cannot_use_is_refused(rtx: TensorRT) -> None:
    file = models()["edge"]["fp16"]
    with pytest.raises(ReleaseRefused, match="builder refuses"):
        build_engine(
            rtx, file.read_bytes(), "m", sms=(86,), timing_cache=None, shapes=Shapes(batch=2, usual=(5, 50, 256))
        )


def test_free_axes_range_from_one_to_the_largest_and_fixed_ones_stay(tmp_path: Path) -> None:
    shapes = Shapes()
    assert shapes.of("hist", (-1, -1, 64)) == ((1, 1, 64), (1, 50, 64), (32, 100, 64))
    assert shapes.of("target", (-1, -1, 64)) == ((1, 1, 64), (1, 256, 64), (32, 512, 64))
    assert shapes.of("mask", (-1, -1)) == ((1, 1), (1, 50), (32, 100))
    assert shapes.of("user", (-1, 32)) == ((1, 32), (1, 32), (32, 32))
    assert shapes.limits() == {"batch": 32, "length": 100, "candidates": 512}
