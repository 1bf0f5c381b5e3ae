"""`trirank release build` for GPUs: what it writes, and what it says when it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.commands.release import app
from infra.engine.run import EngineUnavailable
from infra.engine.store import EngineStore
from infra.engine.tensorrt.api import TensorRT
from infra.engine.tensorrt.build import build_engine
from infra.engine.tensorrt.release import build_target
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import Release, read_release
from tests.gpu_release import write_gpu_release


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return write_gpu_release(tmp_path_factory.mktemp("gpu") / "small")


def test_the_command_builds_both_rankers_beside_the_release_and_leaves_it_as_it_was(release: Release) -> None:
    pytest.importorskip("tensorrt_rtx")
    before = sorted(p.name for p in release.path.rglob("*"))
    done = CliRunner().invoke(
        app, ["build", str(release.path), "--targets", "t4", "--builder", "tensorrt-rtx"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    store = EngineStore(release.path.with_name("small.engines"))
    made = {f"{role}-{p}-t4.rtx" for role in ("edge", "rerank") for p in ("fp16", "int8")}
    assert {e.file for e in store.entries()} == made
    assert sorted(p.name for p in read_release(release.path).path.rglob("*")) == before
    onnx = release.model("rerank", "int8")
    assert onnx is not None
    entry, engine = store.find(
        role="rerank", precision="int8", builder="tensorrt-rtx", version=store.entries()[0].builder_version, sm=75,
        driver="any", onnx=onnx,
    )  # fmt: skip
    assert (entry.target, entry.driver, entry.shapes["candidates"]) == ("t4", None, 512)
    assert engine == (release.path.with_name("small.engines") / entry.file).read_bytes()


def test_only_what_is_missing_or_damaged_is_built_again(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    files = build_target(release, "l4", tmp_path, "tensorrt-rtx")
    contents = [file.read_bytes() for file in files]
    built: list[str] = []

    def counted(trt: TensorRT, model: bytes, name: str, **rest: Any) -> bytes:
        built.append(name)
        return build_engine(trt, model, name, **rest)

    monkeypatch.setattr("infra.engine.tensorrt.release.build_engine", counted)
    assert build_target(release, "l4", tmp_path, "tensorrt-rtx") == files
    assert built == []
    files[0].write_bytes(b"damaged")
    files[1].unlink()
    assert build_target(release, "l4", tmp_path, "tensorrt-rtx") == files
    assert built == ["mlp.int8.onnx", "mlp.fp16.onnx"]
    assert [len(file.read_bytes()) for file in files] == [len(content) for content in contents]


def test_a_release_without_gpu_models_is_refused(tmp_path: Path) -> None:
    plain = write_gpu_release(tmp_path / "plain", ("fp32",))
    with pytest.raises(ReleaseRefused, match="no FP16 and no INT8 model of edge"):
        build_target(plain, "t4", tmp_path / "engines", "tensorrt-rtx")
    assert not (tmp_path / "engines").exists()


def test_without_tensorrt_the_error_says_what_to_install(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.engine.tensorrt.release.require_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineUnavailable, match=r"trirank\[gpu\]"):
        build_target(release, "t4", tmp_path, None)


def test_without_a_driver_the_error_says_where_to_build(release: Release, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(EngineUnavailable, match=r"on a machine with t4, or here with --builder tensorrt-rtx"):
        build_target(release, "t4", tmp_path, "tensorrt")


def test_the_wrong_builder_for_a_target_is_an_error_before_anything_is_built(release: Release, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not build for h200"):
        build_target(release, "h200", tmp_path, "tensorrt-rtx")
    with pytest.raises(InvalidInput, match="builds no engine for a GPU"):
        build_target(release, "t4", tmp_path, "aotinductor")
    assert list(tmp_path.iterdir()) == []


def test_one_target_that_cannot_be_built_does_not_keep_the_others_and_the_exit_status_tells(
    release: Release, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx")
    asked = ["--targets", "h200,l4", "--builder", "tensorrt-rtx", "--engines", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["build", str(release.path), *asked], catch_exceptions=False)
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert "does not build for h200" in told["failed"]["h200"]
    assert {one["target"] for one in told["built"]} == {"l4"}
    assert sorted(Path(one["file"]).name for one in told["built"]) == sorted(p.name for p in tmp_path.glob("*.rtx"))
    assert all(Path(one["file"]).stat().st_size == one["bytes"] for one in told["built"])


def test_an_unknown_target_is_an_error_that_lists_them(release: Release) -> None:
    with pytest.raises(InvalidInput, match=r"'v100' is no target; there are .*t4"):
        CliRunner().invoke(app, ["build", str(release.path), "--targets", "t4,v100"], catch_exceptions=False)
