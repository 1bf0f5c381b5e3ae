"""Which machines engines are built for."""

from __future__ import annotations

import pytest

from infra.commands.build import TARGETS
from infra.engine.tensorrt.targets import RTX_SMS, TARGET_SMS, check_builder, target_sms, usual_builder
from infra.errors import InvalidInput


@pytest.mark.parametrize(("target", "sm"), [("t4", 75), ("a100", 80), ("a10", 86), ("l4", 89), ("h200", 90)])
def test_a_target_stands_for_its_compute_capability(target: str, sm: int) -> None:
    assert target_sms(target, "tensorrt") == (sm,)


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"targets: 'v100' is no GPU; there are t4, .*rtx"):
        target_sms("v100", "tensorrt")


@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
def test_tensorrt_rtx_does_not_build_for_what_it_does_not_know(target: str) -> None:
    with pytest.raises(InvalidInput, match=f"does not build for {target}.*--builder tensorrt"):
        target_sms(target, "tensorrt-rtx")


def test_one_engine_for_several_gpus_is_tensorrt_rtx_alone() -> None:
    assert set(target_sms("rtx", "tensorrt-rtx")) <= set(RTX_SMS)
    assert usual_builder("rtx") == "tensorrt-rtx"
    with pytest.raises(InvalidInput, match="several GPUs"):
        target_sms("rtx", "tensorrt")


def test_a_builder_for_the_cpu_builds_nothing_for_gpus() -> None:
    assert check_builder("tensorrt-rtx") == "tensorrt-rtx"
    with pytest.raises(InvalidInput, match="there are tensorrt, tensorrt-rtx"):
        check_builder("aotinductor")


def test_every_target_can_be_asked_for_on_the_command_line() -> None:
    assert set(TARGET_SMS) <= set(TARGETS)
