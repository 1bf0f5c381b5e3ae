from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import REGISTRY

from infra.engine.batch import MAX_HISTORY, Batching, Padded
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.rank import RankHandler
from infra.engine.run import NonFiniteScores
from infra.errors import InvalidInput, Permanent
from infra.wire.messages import Reply, Request
from tests.onnx_models import write_ranker

TOKEN, USER = 8, 4


class CountingEngine:
    """The real engine; remembers the batches it ran."""

    kind, precision = "onnxruntime-cpu", "fp32"
    batching: Batching = Padded()

    def __init__(self, engine: OnnxEngine) -> None:
        self._engine = engine
        self.batches: list[int] = []

    def run(self, hist: np.ndarray, target: np.ndarray, mask: np.ndarray, user: np.ndarray) -> np.ndarray:
        self.batches.append(hist.shape[0])
        return self._engine.run(hist, target, mask, user)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxEngine:
    return OnnxEngine(write_ranker(tmp_path_factory.mktemp("m") / "r.onnx", TOKEN, USER, poison=True))


@pytest.fixture
def engine(model: OnnxEngine) -> CountingEngine:
    return CountingEngine(model)


@pytest.fixture
def handler(engine: CountingEngine) -> RankHandler:
    return RankHandler(engine, "r1", token_dim=TOKEN, user_dim=USER)


def request(length: int, n: int, seed: int = 0, **changed: np.ndarray) -> Request:
    rng = np.random.default_rng(seed)
    tensors = {
        "hist": rng.standard_normal((length, TOKEN), np.float32),
        "target": rng.standard_normal((n, TOKEN), np.float32),
        "mask": np.ones(length, np.float32),
        "user": rng.standard_normal(USER, np.float32),
    }
    return Request("rank", "r1", tensors=tensors | changed)


def scores(answer: object) -> np.ndarray:
    assert isinstance(answer, Reply), answer
    return answer.tensors["scores"]


def test_waiting_requests_run_as_one_batch_and_each_gets_its_own_scores(
    handler: RankHandler, engine: CountingEngine
) -> None:
    requests = [request(9, 20, 1), request(8, 20, 2), request(9, 18, 3)]

    answers = handler.handle(requests)

    assert engine.batches == [3]
    for one, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, Reply)
        assert answer.args == {"engine": "onnxruntime-cpu:fp32"}
        np.testing.assert_allclose(scores(answer), scores(handler.handle([one])[0]), atol=1e-5)


def test_a_poisoned_request_fails_alone(handler: RankHandler) -> None:
    poisoned = request(3, 20, 4)
    poisoned.tensors["target"][7, 0] = 101.0

    first, second, third = handler.handle([request(3, 20, 1), poisoned, request(3, 20, 2)])

    assert isinstance(second, NonFiniteScores)
    assert scores(first).shape == scores(third).shape == (20,)


def test_what_is_no_request_is_refused_alone(handler: RankHandler) -> None:
    wrong = [
        Request("score", "r1"),
        Request("rank", "other", tensors=request(1, 1).tensors),
        Request("rank", "r1", tensors={"hist": np.zeros((1, TOKEN), np.float32)}),
        request(2, 3, target=np.zeros((3, TOKEN + 1), np.float32)),
        request(2, 3, user=np.zeros(USER, np.float64)),
    ]

    *refused, good = handler.handle([*wrong, request(2, 3)])

    assert [type(answer) for answer in refused] == [InvalidInput, Permanent, InvalidInput, InvalidInput, InvalidInput]
    assert scores(good).shape == (3,)


def test_no_candidates_have_no_scores(handler: RankHandler, engine: CountingEngine) -> None:
    assert scores(handler.handle([request(2, 0)])[0]).shape == (0,)
    assert engine.batches == []


def test_no_requests_have_no_answers(handler: RankHandler) -> None:
    assert list(handler.handle([])) == []


def test_a_long_history_scores_as_its_newest_tokens(handler: RankHandler) -> None:
    long = request(MAX_HISTORY + 40, 5)
    newest = {name: long.tensors[name][-MAX_HISTORY:] for name in ("hist", "mask")}

    cut = Request("rank", "r1", tensors=long.tensors | newest)

    np.testing.assert_array_equal(scores(handler.handle([long])[0]), scores(handler.handle([cut])[0]))


def test_a_batch_that_cannot_be_run_as_one_is_run_one_by_one(model: OnnxEngine) -> None:
    class OneByOne(CountingEngine):
        """Has memory for one request."""

        def run(self, hist: np.ndarray, target: np.ndarray, mask: np.ndarray, user: np.ndarray) -> np.ndarray:
            if hist.shape[0] > 1:
                raise Permanent("no memory for so many")
            return super().run(hist, target, mask, user)

    engine = OneByOne(model)
    handler = RankHandler(engine, "r1", token_dim=TOKEN, user_dim=USER)

    answers = handler.handle([request(3, 20, seed) for seed in range(3)])

    assert [scores(answer).shape for answer in answers] == [(20,)] * 3
    assert engine.batches == [1, 1, 1]


def test_padding_is_counted_in_cells_of_history_times_candidates(model: OnnxEngine) -> None:
    def counted() -> tuple[float, ...]:
        return tuple(
            REGISTRY.get_sample_value("engine_cells_total", {"role": "edge", "kind": kind}) or 0.0
            for kind in ("real", "padding")
        )

    handler = RankHandler(CountingEngine(model), "r1", token_dim=TOKEN, user_dim=USER, role="edge")
    before = counted()

    handler.handle([request(10, 20), request(9, 20), request(3, 0)])

    assert np.subtract(counted(), before).tolist() == [10 * 20 + 9 * 20, 20.0]
