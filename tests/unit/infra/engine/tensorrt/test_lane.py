"""A lane of the TensorRT runner, with device memory in host memory and ONNX Runtime as the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infra.engine.batch import Features
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Bucket, Grid
from infra.engine.onnx_cpu import OnnxEngine
from infra.errors import Permanent
from tests.fake_cuda import FakeError, FakeSession
from tests.onnx_models import write_ranker

TOKEN, USER = 8, 4
GRID = Grid(batches=(1, 2, 4), lengths=(3, 6), candidates=(4, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory.mktemp("model") / "ranker.onnx", TOKEN, USER)


def session_of(model: Path, lanes: int = 2, largest: Bucket = GRID.largest) -> FakeSession:
    return FakeSession(model, (TOKEN, USER), GRID, lanes=lanes, largest=largest)


def some(batch: int, length: int, candidates: int, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    mask = (random.random((batch, length)) < 0.7).astype(np.float32)
    return Features(normal(batch, length, TOKEN), normal(batch, candidates, TOKEN), mask, normal(batch, USER))


def engine_over(session: FakeSession) -> BucketedEngine:
    engine = BucketedEngine("tensorrt", "fp16", lambda _grid: session, grid=GRID)
    engine.load()
    return engine


def test_scores_are_the_engines_for_every_shape_in_any_order(model: Path) -> None:
    engine, plain = engine_over(session_of(model)), OnnxEngine(model)
    shapes = [(1, 1, 1), (4, 6, 8), (3, 5, 7), (1, 3, 4), (4, 2, 3), (9, 6, 21), (2, 6, 1)]
    for seed, shape in enumerate(shapes * 2):
        features = some(*shape, seed=seed)
        got = engine.run(features.hist, features.target, features.mask, features.user)
        expected = plain.run(features.hist, features.target, features.mask, features.user)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_request_is_one_launch_of_a_graph_made_before(model: Path) -> None:
    session = session_of(model)
    engine = engine_over(session)
    captured = len(session.capture.graphs)
    assert captured == len(session.lanes) * len(GRID.buckets())
    enqueued = [context.enqueued for context in session.contexts]
    features = some(2, 5, 7)
    for _ in range(5):
        engine.run(features.hist, features.target, features.mask, features.user)
    assert session.capture.launched == 5
    assert [context.enqueued for context in session.contexts] == enqueued
    assert len(session.capture.graphs) == captured


def test_only_what_the_bucket_needs_is_copied(model: Path) -> None:
    session = session_of(model, lanes=1)
    engine_over(session)
    lane = session.lanes[0]
    before = session.device.driver.copied
    lane.score(Bucket(1, 3, 4), some(1, 2, 3))
    small = session.device.driver.copied - before
    lane.score(GRID.largest, some(4, 6, 8))
    assert 0 < small < (session.device.driver.copied - before - small) / 2


def test_closing_frees_every_graph_and_all_device_memory(model: Path) -> None:
    session = session_of(model)
    engine = engine_over(session)
    assert session.device.driver.allocated > 0
    assert engine.memory_bytes() > session.device.driver.allocated
    engine.close()
    assert (session.device.driver.allocated, session.capture.graphs, session.device.driver.depth) == (0, {}, 0)


def test_an_engine_built_for_smaller_shapes_is_refused_when_it_is_loaded(model: Path) -> None:
    session = session_of(model, largest=Bucket(4, 6, 4))
    with pytest.raises(Permanent, match=r"target .4, 8, 8.*smaller shapes"):
        BucketedEngine("tensorrt", "fp16", lambda _grid: session, grid=GRID).load()
    assert session.device.driver.allocated == 0


def test_an_engine_that_cannot_be_enqueued_is_refused_and_leaves_no_stream_capturing(model: Path) -> None:
    session = session_of(model, lanes=1)
    session.contexts[0].refuses = True
    with pytest.raises(Permanent, match="could not enqueue"):
        BucketedEngine("tensorrt", "fp16", lambda _grid: session, grid=GRID).load()


def test_an_error_of_cuda_is_permanent_and_the_context_is_popped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(model, lanes=1)
    engine = engine_over(session)

    def lost(_graph: int, _stream: int) -> None:
        raise FakeError("cuGraphLaunch failed: an illegal memory access was encountered")

    monkeypatch.setattr(session.capture, "launch", lost)
    features = some(1, 3, 4)
    with pytest.raises(Permanent, match=r"CUDA: .*illegal memory access"):
        engine.run(features.hist, features.target, features.mask, features.user)
    assert session.device.driver.depth == 0
    assert engine.usage().in_flight == 0
