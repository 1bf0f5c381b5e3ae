"""PyTorch in shape buckets: the CUDA engine's own classes on the CPU, where only the recording of graphs is missing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.engine.batch import Features
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.cuda_graph import LANES, TorchLane, cuda_graph_engine, open_session
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import EngineUnavailable, NonFiniteScores
from infra.errors import Permanent
from tests.gpu_release import write_gpu_release
from tests.onnx_models import write_ranker

TOKEN, USER = 8, 4
GRID = Grid(batches=(1, 2, 4), lengths=(3, 6), candidates=(4, 8))


def some(batch: int, length: int, candidates: int, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    mask = (random.random((batch, length)) < 0.7).astype(np.float32)
    return Features(normal(batch, length, TOKEN), normal(batch, candidates, TOKEN), mask, normal(batch, USER))


def scores(engine: OnnxEngine | BucketedEngine, of: Features) -> np.ndarray:
    return engine.run(of.hist, of.target, of.mask, of.user)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory.mktemp("model") / "ranker.onnx", TOKEN, USER, poison=True)


@pytest.fixture
def engine(model: Path) -> Iterator[BucketedEngine]:
    opens = partial(open_session, model, torch.device("cpu"), half=False)
    made = BucketedEngine("cuda-graph", "fp32", opens, grid=GRID)
    made.load()
    yield made
    made.close()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 4), (3, 5, 7), (4, 6, 8), (9, 6, 21), (1, 2, 200)])
def test_scores_are_the_models_for_shapes_that_fill_a_bucket_pad_it_or_need_several(
    engine: BucketedEngine, model: Path, shape: tuple[int, int, int]
) -> None:
    features = some(*shape)
    np.testing.assert_allclose(scores(engine, features), scores(OnnxEngine(model), features), atol=1e-5)


def test_an_earlier_batch_leaves_nothing_behind_not_even_nan(engine: BucketedEngine, model: Path) -> None:
    poisoned = some(4, 6, 8)
    poisoned.hist[:] = np.nan
    poisoned.target[:] = np.nan
    for _ in range(LANES):
        with pytest.raises(NonFiniteScores):
            scores(engine, poisoned)
    features = some(3, 5, 7, seed=1)
    for _ in range(LANES):
        np.testing.assert_allclose(scores(engine, features), scores(OnnxEngine(model), features), atol=1e-5)


def test_scores_that_are_not_finite_are_never_given_out(engine: BucketedEngine) -> None:
    features = some(1, 3, 4)
    features.target[0, 2, 0] = 101.0
    with pytest.raises(NonFiniteScores):
        scores(engine, features)


def test_many_threads_get_their_own_scores(engine: BucketedEngine, model: Path) -> None:
    plain = OnnxEngine(model)
    asked = [some(1 + seed % 4, 1 + seed % 6, 1 + seed % 8, seed) for seed in range(40)]
    expected = [scores(plain, features) for features in asked]
    with ThreadPoolExecutor(6) as threads:
        for got, wanted in zip(threads.map(partial(scores, engine), asked), expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert engine.usage().in_flight == 0
    assert 1 <= engine.usage().peak <= LANES


def test_inputs_of_other_widths_types_or_lengths_are_refused(engine: BucketedEngine) -> None:
    good = some(2, 3, 4)
    wide = some(2, 3, 4)
    with pytest.raises(Permanent, match=r"hist: f32\[2, 3, 8\] is needed, not float32\[2, 3, 7\]"):
        engine.run(good.hist[:, :, :7], good.target, good.mask, good.user)
    with pytest.raises(Permanent, match="mask"):
        engine.run(good.hist, good.target, wide.mask[:, :2], good.user)
    with pytest.raises(Permanent, match="float64"):
        engine.run(good.hist.astype(np.float64), good.target, good.mask, good.user)  # type: ignore[arg-type]
    with pytest.raises(Permanent, match="7 tokens"):
        scores(engine, some(1, 7, 1))
    assert scores(engine, good).shape == (2, 4)


def test_padding_is_counted(engine: BucketedEngine) -> None:
    assert engine.padding() == 0.0
    scores(engine, some(1, 3, 4))
    assert engine.padding() == 0.0
    scores(engine, some(3, 3, 4))
    assert engine.padding() == pytest.approx(1 - (4 + 12) / (4 + 16))


def test_memory_is_that_of_weights_and_buffers_and_is_given_back(engine: BucketedEngine) -> None:
    assert engine.memory_bytes() > LANES * 4 * (4 * 6 * TOKEN + 4 * 8 * TOKEN)
    engine.close()
    engine.close()
    assert engine.memory_bytes() == 0


def test_an_engine_that_was_closed_can_be_loaded_again(engine: BucketedEngine, model: Path) -> None:
    engine.close()
    features = some(1, 3, 4)
    np.testing.assert_allclose(scores(engine, features), scores(OnnxEngine(model), features), atol=1e-5)


def test_a_lane_that_cannot_be_prepared_leaves_no_session_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    session = open_session(model, torch.device("cpu"), GRID, half=False)
    monkeypatch.setattr(session, "close", lambda: closed.append(True))
    monkeypatch.setattr(TorchLane, "prepare", lambda _self, _buckets: (_ for _ in ()).throw(Permanent("no memory")))
    made = BucketedEngine("cuda-graph", "fp32", lambda _grid: session, grid=GRID)
    with pytest.raises(Permanent, match="no memory"):
        made.load()
    assert closed == [True]


def test_what_torch_raises_is_permanent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_self: TorchLane, _layout: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchLane, "_enqueue", out_of_memory)
    made = BucketedEngine(
        "cuda-graph", "fp32", partial(open_session, model, torch.device("cpu"), half=False), grid=GRID
    )
    with pytest.raises(Permanent, match="PyTorch: CUDA out of memory"):
        scores(made, some(1, 3, 4))


def test_without_a_cuda_device_the_engine_is_unavailable(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    made = cuda_graph_engine(write_gpu_release(tmp_path / "small", ("fp32",)), tmp_path, "edge", "fp16")
    with pytest.raises(EngineUnavailable, match="no CUDA device"):
        made.load()


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_half_precision_of_a_real_ranker_stays_near_its_full_one(tmp_path: Path, role: str) -> None:
    release = write_gpu_release(tmp_path / "small", ("fp32",))
    random = np.random.default_rng(0)
    inputs = [
        random.standard_normal(shape).astype(np.float32) for shape in ((2, 20, 64), (2, 30, 64), (2, 20), (2, 32))
    ]
    inputs[2] = np.ones((2, 20), np.float32)
    full = OnnxEngine(release.path / release.manifest.models[role]["fp32"]).run(*inputs)
    half = cuda_graph_engine(release, tmp_path, role, "fp16", device="cpu")  # type: ignore[arg-type]
    assert (half.kind, half.precision) == ("cuda-graph", "fp16")
    got = half.run(*inputs)
    assert 0 < np.abs(got - full).max() < 0.05 * max(1.0, float(np.abs(full).max()))
