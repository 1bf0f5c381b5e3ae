from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gateway.degrade import Budget, Scores, best_first, explain, places, sigmoid, usable


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_rerankers_order_comes_first_and_the_rest_follows_in_edge_order() -> None:
    scores = Scores(f32(1, 2, 3, 4, 5), f32(5, 1, 4, 2, 3), np.array([0, 2]), f32(0.1, 0.9))

    found = places(scores, 5)

    assert [(p.candidate, p.stage) for p in found] == [
        (2, "rerank"), (0, "rerank"), (4, "edge"), (3, "edge"), (1, "edge"),
    ]  # fmt: skip
    assert [p.logit for p in found[2:]] == [3, 2, 1]


def test_without_the_reranker_the_order_is_the_edges() -> None:
    found = places(Scores(f32(1, 2, 3), f32(5, 1, 4), np.array([0, 2])), 2)

    assert [(p.candidate, p.stage) for p in found] == [(0, "edge"), (2, "edge")]


def test_without_the_edge_the_order_is_recalls() -> None:
    found = places(Scores(f32(1, 3, 2)), 5)

    assert [(p.candidate, p.stage) for p in found] == [(1, "recall"), (2, "recall"), (0, "recall")]


def test_ties_keep_the_order_of_the_candidates() -> None:
    assert [p.candidate for p in places(Scores(f32(*[0] * 6), f32(1, 2, 1, 2, 1, 2)), 6)] == [1, 3, 5, 0, 2, 4]


def test_a_score_that_is_not_finite_never_wins_a_place() -> None:
    assert best_first(f32(math.nan, 1, -math.inf, 2)).tolist()[:2] == [3, 1]
    assert not usable(f32(1, math.nan), 2)
    assert not usable(f32(1, math.inf), 2)
    assert not usable(f32(1), 2)
    assert not usable(np.ones((2, 1), np.float32), 2)
    assert usable(f32(1, 2), 2)


@given(
    edge=st.lists(st.integers(-5, 5), min_size=0, max_size=60),
    depth=st.integers(1, 30),
    k=st.integers(1, 70),
)
def test_every_candidate_has_at_most_one_place_and_none_is_lost(edge: list[int], depth: int, k: int) -> None:
    scores = Scores(f32(*[0] * len(edge)), f32(*edge))
    assert scores.edge is not None
    scores.chosen = best_first(scores.edge)[:depth]
    scores.rerank = -scores.edge[scores.chosen]

    found = places(scores, k)

    assert len(found) == min(k, len(edge))
    assert len({p.candidate for p in found}) == len(found)
    assert [p.stage for p in found] == (["rerank"] * min(depth, len(edge)) + ["edge"] * len(edge))[: len(found)]


def test_an_explanation_has_score_and_rank_of_each_stage_that_scored_it() -> None:
    scores = Scores(f32(1, 2, 3), f32(3, 2, 1), np.array([0, 1]), f32(5, 6))

    assert explain(scores, [1, 2]) == [
        {"recall": (2.0, 2), "edge": (2.0, 2), "rerank": (6.0, 1)},
        {"recall": (3.0, 1), "edge": (1.0, 3)},
    ]


def test_the_sigmoid_does_not_overflow() -> None:
    assert [sigmoid(x) for x in (-math.inf, -1e4, 0.0, 1e4, math.inf)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert sigmoid(1.0) == pytest.approx(1 / (1 + math.exp(-1)))


@pytest.mark.parametrize("total_s", [0.001, 0.01, 0.1, 10.0])
def test_each_stage_is_over_before_the_next_and_all_before_the_deadline(total_s: float) -> None:
    budget = Budget(100.0, total_s)

    ends = [budget.deadline(stage).at_s for stage in ("features", "embeddings", "edge", "rerank")]

    assert 100.0 < ends[0] < ends[1] < ends[2] < ends[3] < 100.0 + total_s
