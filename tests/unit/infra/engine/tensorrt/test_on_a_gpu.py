"""The TensorRT runner on a GPU, with PyTorch enqueuing the work that TensorRT would; skipped without GPU or pycuda."""

from __future__ import annotations

import importlib.util
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
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import NonFiniteScores
from infra.engine.torch_graph import read_module
from infra.errors import Permanent
from tests.gpu_release import models
from tests.quantised_models import TOKEN, USER
from tests.torch_context import TorchContexts

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("pycuda") is None, reason="needs a GPU and pycuda"
)
GRID = Grid(batches=(1, 2, 4), lengths=(25, 50), candidates=(64, 104))


@pytest.fixture(scope="module")
def model() -> Path:
    return models()["rerank"]["fp32"]


@pytest.fixture
def engine(model: Path) -> Iterator[BucketedEngine]:
    module = read_module(model).to("cuda")
    made = BucketedEngine("tensorrt", "fp32", lambda grid: TorchContexts(module, (TOKEN, USER), grid), grid=GRID)
    made.load()
    yield made
    made.close()


def some(batch: int, length: int, candidates: int, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32) / 3

    mask = (random.random((batch, length)) < 0.7).astype(np.float32)
    return Features(normal(batch, length, TOKEN), normal(batch, candidates, TOKEN), mask, normal(batch, USER))


def scores(engine: OnnxEngine | BucketedEngine, of: Features) -> np.ndarray:
    return engine.run(of.hist, of.target, of.mask, of.user)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 50, 104), (3, 20, 90), (9, 50, 240), (1, 50, 64)])
def test_scores_are_the_models_through_pinned_memory_copies_and_captured_graphs(
    engine: BucketedEngine, model: Path, shape: tuple[int, int, int]
) -> None:
    features = some(*shape)
    np.testing.assert_allclose(scores(engine, features), scores(OnnxEngine(model), features), atol=2e-3)


def test_many_threads_on_two_lanes_get_their_own_scores(engine: BucketedEngine, model: Path) -> None:
    plain = OnnxEngine(model)
    asked = [some(1 + seed % 4, 1 + seed % 50, 1 + seed % 104, seed) for seed in range(60)]
    expected = [scores(plain, features) for features in asked]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            for got, wanted in zip(threads.map(partial(scores, engine), asked), expected, strict=True):
                np.testing.assert_allclose(got, wanted, atol=2e-3)
    assert engine.usage().peak == 2


def test_nan_is_refused_and_leaves_nothing_behind(engine: BucketedEngine, model: Path) -> None:
    poisoned = some(4, 50, 104)
    poisoned.hist[:] = np.nan
    for _ in range(2):
        with pytest.raises(NonFiniteScores):
            scores(engine, poisoned)
    features = some(3, 20, 90, seed=1)
    for _ in range(2):
        np.testing.assert_allclose(scores(engine, features), scores(OnnxEngine(model), features), atol=2e-3)


def test_pytorch_on_the_same_primary_context_is_not_disturbed(engine: BucketedEngine) -> None:
    a = torch.randn(256, 256, device="cuda")
    expected = a @ a
    for seed in range(20):
        scores(engine, some(2, 30, 80, seed))
        torch.testing.assert_close(a @ a, expected)
    assert torch.cuda.current_device() == 0


class Sums(torch.nn.Module):
    """No product of matrices, for which PyTorch would keep a workspace of every stream there ever was."""

    def forward(self, hist: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        return target.sum(2) + (hist.sum(2) * mask).sum(1, keepdim=True) + user.sum(1, keepdim=True)


def test_device_memory_is_given_back() -> None:
    features = some(2, 20, 30)
    expected = features.target.sum(2) + (features.hist.sum(2) * features.mask).sum(1, keepdims=True)

    def once() -> int:
        made = BucketedEngine("tensorrt", "fp32", lambda grid: TorchContexts(Sums(), (TOKEN, USER), grid))
        made.load()
        got = scores(made, features)
        np.testing.assert_allclose(got, expected + features.user.sum(1, keepdims=True), atol=1e-4)
        # 37 MB of buffers for the largest bucket on two lanes, which are not torch's.
        while_open = torch.cuda.mem_get_info()[0]
        made.close()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        assert free - while_open > 8 << 20
        return free

    once()
    first = once()
    assert min(once() for _ in range(4)) > first - (8 << 20)


def test_what_cannot_be_captured_is_refused_and_leaves_the_stream_usable(model: Path) -> None:
    class Waits(torch.nn.Module):
        def forward(self, _hist: torch.Tensor, target: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            torch.cuda.current_stream().synchronize()
            return target.sum(2)

    with pytest.raises((Permanent, RuntimeError)):
        BucketedEngine("tensorrt", "fp32", lambda grid: TorchContexts(Waits(), (TOKEN, USER), grid), grid=GRID).load()
    module = read_module(model).to("cuda")
    made = BucketedEngine("tensorrt", "fp32", lambda grid: TorchContexts(module, (TOKEN, USER), grid), grid=GRID)
    features = some(1, 3, 4)
    np.testing.assert_allclose(scores(made, features), scores(OnnxEngine(model), features), atol=2e-3)
    made.close()
