"""The runner's session: which engines it opens, what it says to those it does not, and what it never imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.engine.run import EngineUnavailable
from infra.engine.store import EngineStore
from infra.engine.tensorrt import run
from infra.engine.tensorrt.gpu import Gpu
from infra.engine.tensorrt.release import build_target
from infra.engine.tensorrt.run import ranker_tensors, tensorrt_engine
from infra.errors import ReleaseRefused
from infra.release import Release
from tests.gpu_release import write_gpu_release


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return write_gpu_release(tmp_path_factory.mktemp("gpu") / "small")


@pytest.fixture
def a_t4(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a T4 whose context cannot be used: everything before the GPU works."""
    device = SimpleNamespace(here=Gpu("Tesla T4", 75, "580.1"))
    device.gpu = lambda: device.here
    monkeypatch.setattr(run, "require_driver", lambda: None)
    monkeypatch.setattr(run, "open_device", lambda: device)
    return device


def refusal(release: Release, folder: Path) -> str:
    engine = tensorrt_engine("tensorrt-rtx", release, folder, "edge", "int8")
    assert (engine.kind, engine.precision, engine.memory_bytes()) == ("tensorrt-rtx", "int8", 0)
    with pytest.raises(EngineUnavailable) as caught:
        engine.load()
    return str(caught.value)


def test_a_replica_with_a_t4_needs_neither_torch_nor_onnx() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxruntime', 'onnxscript', 'triton', 'polars'): sys.modules[name] = None\n"
        "import edge_ranker.rank_server, infra.engine.tensorrt.run, infra.engine.offers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_driver_nothing_else_is_looked_for(release: Release, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    assert "no NVIDIA driver" in refusal(release, tmp_path)


def test_a_release_without_this_precision_is_told(tmp_path: Path) -> None:
    plain = write_gpu_release(tmp_path / "plain", ("fp32",))
    assert "no int8 model of edge" in refusal(plain, tmp_path)


def test_an_engine_that_was_not_built_or_not_for_this_gpu_is_told(
    release: Release, tmp_path: Path, a_t4: SimpleNamespace
) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert "trirank release build" in refusal(release, tmp_path)
    build_target(release, "a10", tmp_path, "tensorrt-rtx")
    assert "built by tensorrt-rtx for SM86; this machine is SM75" in refusal(release, tmp_path)
    a_t4.here = Gpu("A10", 86, "580.1")
    damaged = tmp_path / "edge-int8-a10.rtx"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "damaged" in refusal(release, tmp_path)
    assert [entry.target for entry in EngineStore(tmp_path).entries()] == ["a10"] * 4


def fake_engine(**tensors: tuple[str, str]) -> Any:
    """An engine with these tensors: name -> (mode, type)."""
    names = list(tensors)
    return SimpleNamespace(
        num_io_tensors=len(names),
        get_tensor_name=lambda index: names[index],
        get_tensor_mode=lambda name: tensors[name][0],
        get_tensor_dtype=lambda name: tensors[name][1],
    )


TRT: Any = SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT="in"), DataType=SimpleNamespace(FLOAT="f32"))


def test_an_engine_whose_tensors_are_not_a_rankers_is_refused() -> None:
    whole = {"hist": ("in", "f32"), "target": ("in", "f32"), "logits": ("out", "f32")}
    assert ranker_tensors(TRT, fake_engine(**whole)) == (["hist", "target"], "logits")
    with pytest.raises(ReleaseRefused, match="image"):
        ranker_tensors(TRT, fake_engine(**whole, image=("in", "f32")))
    with pytest.raises(ReleaseRefused, match="not those of a ranker"):
        ranker_tensors(TRT, fake_engine(**whole, more=("out", "f32")))
    with pytest.raises(ReleaseRefused, match="hist is not FP32"):
        ranker_tensors(TRT, fake_engine(**{**whole, "hist": ("in", "f16")}))
