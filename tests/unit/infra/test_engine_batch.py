from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.engine.batch import (
    MAX_HISTORY,
    MAX_WASTE,
    Features,
    Limited,
    Padded,
    check_features,
    group,
    newest,
    pad,
    unpad,
)
from infra.engine.buckets import Grid
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import NonFiniteScores
from infra.errors import InvalidInput, Permanent, ReleaseRefused
from tests.onnx_models import write_ranker

TOKEN, USER = 8, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> OnnxEngine:
    made = OnnxEngine(write_ranker(tmp_path_factory.mktemp("m") / "r.onnx", TOKEN, USER, poison=True))
    made.load()
    return made


def features(length: int, n: int, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    return Features(
        rng.standard_normal((length, TOKEN), np.float32),
        rng.standard_normal((n, TOKEN), np.float32),
        np.ones(length, np.float32),
        rng.standard_normal(USER, np.float32),
    )


def run(engine: OnnxEngine, requests: list[Features]) -> list[np.ndarray]:
    batch = pad(requests)
    return unpad(engine.run(batch.hist, batch.target, batch.mask, batch.user), [r.target.shape[0] for r in requests])


@settings(deadline=None, max_examples=40)
@given(shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=8))
def test_a_request_gets_the_same_scores_in_a_batch_as_alone(engine: OnnxEngine, shapes: list[tuple[int, int]]) -> None:
    requests = [features(length, n, seed) for seed, (length, n) in enumerate(shapes)]

    together = run(engine, requests)

    for request, scores in zip(requests, together, strict=True):
        np.testing.assert_allclose(scores, run(engine, [request])[0], atol=1e-5)


def test_the_scores_are_those_of_the_formula(engine: OnnxEngine) -> None:
    request = features(5, 7)

    [scores] = run(engine, [request])

    expected = request.target @ (request.hist.sum(0) / 6) + request.user.sum()
    np.testing.assert_allclose(scores, expected, atol=1e-5)


SHAPES = st.tuples(st.integers(1, MAX_HISTORY), st.integers(0, 600))


@given(st.lists(SHAPES, max_size=60), st.integers(1, 40), st.integers(1, 5000))
def test_groups_hold_each_request_once_and_less_than_30_percent_padding(
    shapes: list[tuple[int, int]], max_requests: int, max_rows: int
) -> None:
    groups = group(shapes, Padded(max_requests, max_rows))

    assert sorted(i for g in groups for i in g) == list(range(len(shapes)))
    for g in groups:
        lengths, candidates = [shapes[i][0] for i in g], [shapes[i][1] for i in g]
        padded = len(g) * max(lengths) * max(candidates)
        assert len(g) == 1 or (len(g) <= max_requests and len(g) * max(candidates) <= max_rows)
        assert padded - sum(a * b for a, b in zip(lengths, candidates, strict=True)) <= 0.3 * padded


@given(st.lists(SHAPES, max_size=60), st.integers(1, 40), st.integers(1, 20000))
def test_in_buckets_a_request_is_computed_as_if_alone_or_little_of_its_group_is_padding(
    shapes: list[tuple[int, int]], max_requests: int, max_rows: int
) -> None:
    grid = Grid()
    groups = group(shapes, Limited(grid, max_requests, max_rows))

    assert sorted(i for g in groups for i in g) == list(range(len(shapes)))
    for g in groups:
        lengths, candidates = [shapes[i][0] for i in g], [shapes[i][1] for i in g]
        each = grid.cells(1, max(lengths), max(candidates))
        real = sum(a * b for a, b in zip(lengths, candidates, strict=True))
        assert all(grid.cells(1, *shapes[i]) == each for i in g) or real >= (1 - MAX_WASTE) * len(g) * each
        # Then the batch is rounded up to a size of the grid.
        assert grid.cells(len(g), max(lengths), max(candidates)) <= 24 / 17 * len(g) * each
        assert len(g) == 1 or (len(g) <= max_requests and len(g) * max(candidates) <= max_rows)


def test_requests_of_like_shapes_share_one_batch() -> None:
    assert group([(50, 100)] * 3, Padded()) == [[0, 1, 2]]
    assert group([(50, 100), (1, 100), (48, 98), (2, 400)], Padded()) == [[1], [2, 0], [3]]


def test_a_cpu_takes_eight_requests_or_1024_candidates_at_once_and_a_gpu_what_its_largest_bucket_holds() -> None:
    def sizes(batching: Padded | Grid, n: int) -> list[int]:
        return [len(g) for g in group([(50, n)] * 40, batching)]

    assert sizes(Padded(), 100) == [8] * 5
    assert sizes(Padded(), 500) == [2] * 20
    assert sizes(Grid(), 100) == [32, 8]
    assert sizes(Grid(), 500) == [32, 8]


def test_of_a_long_history_the_newest_real_tokens_count() -> None:
    long = features(MAX_HISTORY + 30, 3)
    long.mask[-5:] = 0.0

    cut = newest(long)

    np.testing.assert_array_equal(cut.hist, long.hist[25 : MAX_HISTORY + 25])
    np.testing.assert_array_equal(cut.mask, np.ones(MAX_HISTORY, np.float32))
    assert newest(cut) is cut


def test_a_long_history_of_which_nothing_is_real_is_one_masked_token() -> None:
    empty = features(MAX_HISTORY + 1, 3)
    empty.mask[:] = 0.0

    assert newest(empty).mask.tolist() == [0.0]


def test_a_score_that_is_not_finite_is_refused(engine: OnnxEngine) -> None:
    request = features(2, 3)
    request.target[1, 0] = 101.0

    with pytest.raises(NonFiniteScores):
        run(engine, [request])


def test_a_shape_the_model_does_not_take_is_an_error_of_ours(engine: OnnxEngine) -> None:
    wrong = np.zeros((1, 2, TOKEN + 1), np.float32)

    with pytest.raises(Permanent):
        engine.run(wrong, wrong, np.ones((1, 2), np.float32), np.zeros((1, USER), np.float32))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"no model")

    with pytest.raises(ReleaseRefused, match=r"no\.onnx"):
        OnnxEngine(tmp_path / "no.onnx").load()


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("hist", {"hist": np.zeros((2, TOKEN), np.float64)}),
        ("target", {"target": np.zeros(TOKEN, np.float32)}),
        ("target", {"target": np.zeros((3, TOKEN + 1), np.float32)}),
        ("mask", {"mask": np.ones(3, np.float32)}),
        ("hist", {"hist": np.zeros((2, TOKEN - 1), np.float32)}),
        ("hist", {"hist": np.zeros((0, TOKEN), np.float32), "mask": np.ones(0, np.float32)}),
        ("user", {"user": np.zeros((1, USER), np.float32)}),
        ("user", {"user": np.zeros(USER + 1, np.float32)}),
    ],
)
def test_features_that_are_no_request_name_the_tensor(field: str, changed: dict[str, np.ndarray]) -> None:
    good = features(2, 3)
    parts = {name: getattr(good, name) for name in ("hist", "target", "mask", "user")} | changed

    with pytest.raises(InvalidInput) as raised:
        check_features(Features(**parts), TOKEN, USER)
    assert raised.value.field == field
