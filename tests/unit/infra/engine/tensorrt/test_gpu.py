"""Which GPU a process has, and its primary context."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from infra.engine.nvidia import require_driver
from infra.engine.run import EngineUnavailable
from infra.engine.tensorrt import gpu
from infra.engine.tensorrt.gpu import driver_version, open_device
from infra.engine.tensorrt.release import build_target
from infra.errors import InvalidInput
from tests.gpu_release import write_gpu_release


class FakeContext:
    """Counts who has it on top of their stack."""

    def __init__(self) -> None:
        self.pushed = 0
        self.most = 0

    def push(self) -> None:
        self.pushed += 1
        self.most = max(self.most, self.pushed)

    def pop(self) -> None:
        self.pushed -= 1


@pytest.fixture
def pycuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pycuda on a machine with one T4."""
    driver = ModuleType("pycuda.driver")
    made = SimpleNamespace(contexts=[], module=driver, broken=False)

    class Error(Exception):
        pass

    def init() -> None:
        if made.broken:
            raise Error("cuInit failed: no CUDA-capable device is detected")

    def retain() -> FakeContext:
        made.contexts.append(FakeContext())
        return made.contexts[-1]

    device = SimpleNamespace(name=lambda: "Tesla T4", compute_capability=lambda: (7, 5), retain_primary_context=retain)
    members = {"Error": Error, "init": init, "Device": lambda _index: device, "get_driver_version": lambda: 13000}
    for name, member in members.items():
        setattr(driver, name, member)
    package = ModuleType("pycuda")
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.setattr(gpu, "_RETAINED", {})
    return made


def test_the_primary_context_is_retained_once_for_every_engine_and_thread(pycuda: SimpleNamespace) -> None:
    def use(_: int) -> None:
        with open_device().current():
            assert pycuda.contexts[0].pushed > 0

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(40)))
    assert len(pycuda.contexts) == 1
    assert pycuda.contexts[0].pushed == 0


def test_the_context_is_popped_after_an_error(pycuda: SimpleNamespace) -> None:
    with pytest.raises(ZeroDivisionError), open_device().current():
        raise ZeroDivisionError
    assert pycuda.contexts[0].pushed == 0


def test_a_gpu_says_what_it_is(pycuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_KERNEL_MODULE", tmp_path / "none")
    found = open_device().gpu()
    assert (found.name, found.sm) == ("Tesla T4", 75)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 2024\nGCC version: 12", "535.161.08"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", "cuda-13000"),
    ],
)
def test_the_driver_is_that_of_the_kernel_module(
    pycuda: SimpleNamespace, tmp_path: Path, text: str, version: str
) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    assert driver_version(pycuda.module, file) == version
    assert driver_version(pycuda.module, tmp_path / "none") == "cuda-13000"


def test_without_a_gpu_or_without_pycuda_the_reason_is_told(
    pycuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pycuda.broken = True
    with pytest.raises(EngineUnavailable, match=r"no GPU that CUDA can use: .*no CUDA-capable device"):
        open_device()
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.delitem(sys.modules, "pycuda.driver")
    with pytest.raises(EngineUnavailable, match=r"trirank\[gpu\]"):
        open_device()


def test_tensorrt_builds_for_a_target_only_on_one(
    pycuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = write_gpu_release(tmp_path / "small")
    package = ModuleType("tensorrt")
    package.__version__ = "11.4.0.106"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", package)
    monkeypatch.setattr("infra.engine.tensorrt.release.require_driver", lambda: None)
    with pytest.raises(InvalidInput, match=r"has a Tesla T4 \(SM75\); tensorrt builds for l4 \(SM89\) only on one"):
        build_target(release, "l4", tmp_path / "engines", "tensorrt")


def test_a_machine_without_the_drivers_library_says_so() -> None:
    with pytest.raises(EngineUnavailable, match=r"no NVIDIA driver \(libnowhere\.so\.1"):
        require_driver("libnowhere.so.1")
