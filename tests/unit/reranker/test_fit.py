"""The joint fit: its schedule, its two threads, and that the best pass is kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_ranker.samples import Samples
from edge_ranker.tables import Tables
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut
from reranker.fit import PARTS, Rankers, Recipe, fit, one_cycle, steps_per_pass
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)
RECIPE = replace(Recipe(), batch_size=32)


@pytest.fixture(autouse=True)
def one_thread_per_operation() -> Iterator[None]:
    """As in training: torch's own threads would wait for each other at every small operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def timeline() -> Timeline:
    return cut(small_dataset())


def _rankers(timeline: Timeline, **more: int) -> Rankers:
    torch.manual_seed(0)
    return Rankers(Tables(SCHEMA, timeline, **more))


def _samples(timeline: Timeline) -> Samples:
    return Samples(
        timeline,
        SCHEMA,
        timeline.train,
        rng=np.random.default_rng(0),
        batch_size=RECIPE.batch_size,
        negatives_per_kind=2,
        bucket_share=0.5,
    )


def test_the_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    shares = [one_cycle(done, 0.2) for done in np.linspace(0, 1, 101)]
    assert shares[0] == pytest.approx(0.04)
    assert shares[20] == max(shares) == pytest.approx(1.0)
    assert shares[-1] == pytest.approx(0.0)
    assert (np.diff(shares[:21]) > 0).all()
    assert (np.diff(shares[20:]) < 0).all()


@pytest.mark.parametrize(("n_events", "passes"), [(100, 40), (85_000, 4), (10_000_000, 1)])
def test_a_short_log_is_passed_over_more_often(n_events: int, passes: int) -> None:
    assert Recipe().passes(n_events) == passes


def test_the_best_pass_on_validation_is_kept(timeline: Timeline) -> None:
    rankers = _rankers(timeline)
    scores, states, steps = iter([0.5, 0.9, 0.7]), [], []

    def validate() -> float:
        states.append(copy.deepcopy(rankers.state_dict()))
        return next(scores)

    samples = _samples(timeline)
    log = fit(rankers, samples, RECIPE, passes=3, validate=validate, on_step=lambda: steps.append(1))
    assert [entry["validation_auc"] for entry in log] == [0.5, 0.9, 0.7]
    assert len(steps) == 3 * steps_per_pass(samples) == 3 * (timeline.train.size // RECIPE.batch_size // PARTS)
    for name, value in rankers.state_dict().items():
        torch.testing.assert_close(value, states[1][name])
    assert not torch.equal(states[0]["tables.item"], states[1]["tables.item"])


def test_without_a_verdict_the_last_pass_is_kept(timeline: Timeline) -> None:
    rankers = _rankers(timeline)
    states = []

    def validate() -> float:
        states.append(copy.deepcopy(rankers.state_dict()))
        return float("nan")

    fit(rankers, _samples(timeline), RECIPE, passes=2, validate=validate, on_step=lambda: None)
    torch.testing.assert_close(rankers.state_dict()["tables.item"], states[-1]["tables.item"])


@pytest.mark.parametrize("sparse_from_rows", [1, 10**9])
def test_all_three_losses_fall_and_the_threads_do_not_change_the_result(
    timeline: Timeline, sparse_from_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sparse_from_rows == 1:
        monkeypatch.setattr("edge_ranker.samples.RECALL_SAMPLE", 20)
    results = []
    for _ in range(2):
        rankers = _rankers(timeline, sparse_from_rows=sparse_from_rows)
        log = fit(rankers, _samples(timeline), RECIPE, passes=4, validate=lambda: float("nan"), on_step=lambda: None)
        results.append(rankers.state_dict())
        for loss in ("edge_loss", "rerank_loss", "recall_loss"):
            assert log[-1][loss] < log[0][loss]
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
