"""What every engine of the CPU keeps: the same answers, the same errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra.engine.aot_build import build_cpu, build_engine
from infra.engine.isa import cpu_isa
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import Engine, EngineUnavailable, NonFiniteScores
from infra.engine.store import EngineStore
from infra.engine.torch_cpu import AotInductorEngine, TorchCpuEngine
from infra.errors import InvalidInput, Permanent, ReleaseRefused
from infra.release import Release
from tests.tiny_release import SCHEMA, write_tiny_release

KINDS = ("onnxruntime-cpu", "torch-cpu", "aotinductor")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Path]:
    """A release, and its engines compiled for this machine."""
    folder = tmp_path_factory.mktemp("r")
    release = write_tiny_release(folder / "r", poison=True)
    file = build_engine(release, "rerank", "cpu", EngineStore(folder / "r.engines"))
    assert file.name == f"rerank-fp32-cpu-{cpu_isa()}.pt2"
    return release, folder / "r.engines"


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, built: tuple[Release, Path]) -> Callable[[], Engine]:
    release, folder = built
    return {
        "onnxruntime-cpu": lambda: OnnxEngine(release.rerank_model),
        "torch-cpu": lambda: TorchCpuEngine(release.rerank_model),
        "aotinductor": lambda: AotInductorEngine(EngineStore(folder), "rerank", release.rerank_model),
    }[request.param]


@pytest.fixture
def engine(make: Callable[[], Engine]) -> Engine:
    made = make()
    made.load()
    return made


def inputs(n_requests: int, length: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.ones((n_requests, length), np.float32)
    mask[0] = 0.0
    return [
        rng.standard_normal((n_requests, length, SCHEMA.token_dim), np.float32),
        rng.standard_normal((n_requests, n, SCHEMA.token_dim), np.float32),
        mask,
        rng.standard_normal((n_requests, SCHEMA.user_dim), np.float32),
    ]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 50, 200), (8, 100, 3), (3, 7, 2000)])
def test_scores_are_those_of_the_formula_for_every_shape(engine: Engine, shape: tuple[int, int, int]) -> None:
    hist, target, mask, user = inputs(*shape)

    scores = engine.run(hist, target, mask, user)

    mean = (hist * mask[:, :, None]).sum(1) / (mask.sum(1, keepdims=True) + 1)
    expected = 3 * ((target @ mean[:, :, None])[:, :, 0] + user.sum(1, keepdims=True))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


def test_arrays_that_may_not_be_written_to_are_taken(engine: Engine) -> None:
    arrays = inputs(1, 3, 4)
    for array in arrays:
        array.flags.writeable = False

    assert engine.run(*arrays).shape == (1, 4)


def test_scores_that_are_not_finite_are_refused(engine: Engine) -> None:
    arrays = inputs(2, 3, 4)
    arrays[1][1, 2, 0] = 101.0

    with pytest.raises(NonFiniteScores):
        engine.run(*arrays)


def test_shapes_the_model_does_not_take_are_an_error_of_ours(engine: Engine) -> None:
    hist, target, mask, user = inputs(1, 3, 4)

    for wrong in (
        (hist[:, :, 1:], target, mask, user),
        (hist, target[:, :, 1:], mask, user),
        (hist, target, mask[:, 1:], user),
    ):
        with pytest.raises(Permanent):
            engine.run(*(np.ascontiguousarray(array) for array in wrong))


def test_an_engine_says_what_it_is_and_what_it_takes(make: Callable[[], Engine]) -> None:
    engine = make()
    assert engine.memory_bytes() == 0
    engine.close()

    engine.load()

    assert engine.kind in KINDS
    assert engine.precision == "fp32"
    assert engine.memory_bytes() > 0
    engine.close()
    engine.close()
    assert engine.memory_bytes() == 0


@pytest.mark.parametrize("damage", ["absent", "flipped", "another model", "another torch"])
def test_a_compiled_engine_is_not_loaded_unless_it_is_what_was_built(
    built: tuple[Release, Path], tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, folder = built
    [entry] = EngineStore(folder).entries()
    code = (folder / entry.file).read_bytes()
    store = EngineStore(tmp_path)
    model, says = release.rerank_model, "holds no aotinductor engine"
    if damage != "absent":
        store.add(entry, code)
    if damage == "flipped":
        middle = len(code) // 2
        (tmp_path / entry.file).write_bytes(code[:middle] + bytes([code[middle] ^ 1]) + code[middle + 1 :])
        says = "is damaged"
    if damage == "another model":
        model, says = release.edge_model, "is stale"
    if damage == "another torch":
        monkeypatch.setattr("infra.engine.torch_cpu.builder_version", lambda: "torch 9 for avx512-0")
        says = "torch 9 for avx512-0 is installed"

    with pytest.raises(EngineUnavailable, match=says):
        AotInductorEngine(store, "rerank", model).load()


def test_another_builder_is_refused_by_name(built: tuple[Release, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'tensorrt' does not build for cpu"):
        build_cpu(built[0], "cpu", tmp_path, "tensorrt")


def test_without_a_compiler_the_build_says_so(
    built: tuple[Release, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ReleaseRefused, match="install g"):
        build_cpu(built[0], "cpu", tmp_path, None)


def test_the_isa_of_a_machine_changes_with_what_it_can_do_and_with_nothing_else() -> None:
    here = "processor : 0\nflags\t\t: fpu avx avx2 fma nopl\nmodel name : a\n"

    assert cpu_isa(here) == cpu_isa(here.replace("nopl", "constant_tsc").replace("name : a", "name : b"))
    assert cpu_isa(here).startswith("avx2-")
    assert cpu_isa(here.replace("avx2", "avx2 avx512f")).startswith("avx512-")
    assert cpu_isa(here.replace(" fma", "")) != cpu_isa(here)
    assert cpu_isa("Features : fp asimd sve\n").startswith("sve-")
    assert cpu_isa("").startswith("plain-")
