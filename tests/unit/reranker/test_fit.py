"""The joint fit: its schedule, its two threads, and that the best pass is kept."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from feature_service.timeline import Timeline, cut
from reranker.fit import PARTS, Recipe, fit, one_cycle, steps_per_pass
from tests.logs_of_events import small_dataset
from tests.unit.reranker.small_log import RECIPE, small_rankers, small_samples

pytestmark = pytest.mark.usefixtures("one_thread_per_operation")


@pytest.fixture
def timeline() -> Timeline:
    return cut(small_dataset())


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
    rankers = small_rankers(timeline)
    scores, states, steps = iter([0.5, 0.9, 0.7]), [], []

    def validate() -> float:
        states.append(copy.deepcopy(rankers.state_dict()))
        return next(scores)

    samples = small_samples(timeline)
    log = fit(rankers, samples, RECIPE, passes=3, validate=validate, on_step=lambda: steps.append(1))
    assert [entry["validation_auc"] for entry in log] == [0.5, 0.9, 0.7]
    assert len(steps) == 3 * steps_per_pass(samples) == 3 * (timeline.train.size // RECIPE.batch_size // PARTS)
    for name, value in rankers.state_dict().items():
        torch.testing.assert_close(value, states[1][name])
    assert not torch.equal(states[0]["tables.item"], states[1]["tables.item"])


def test_without_a_verdict_the_last_pass_is_kept(timeline: Timeline) -> None:
    rankers = small_rankers(timeline)
    states = []

    def validate() -> float:
        states.append(copy.deepcopy(rankers.state_dict()))
        return float("nan")

    fit(rankers, small_samples(timeline), RECIPE, passes=2, validate=validate, on_step=lambda: None)
    torch.testing.assert_close(rankers.state_dict()["tables.item"], states[-1]["tables.item"])


@pytest.mark.parametrize("sparse_from_rows", [1, 10**9])
def test_all_three_losses_fall_and_the_threads_do_not_change_the_result(
    timeline: Timeline, sparse_from_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sparse_from_rows == 1:
        monkeypatch.setattr("edge_ranker.samples.RECALL_SAMPLE", 20)
    results = []
    for _ in range(2):
        rankers = small_rankers(timeline, sparse_from_rows=sparse_from_rows)
        log = fit(
            rankers, small_samples(timeline), RECIPE, passes=4, validate=lambda: float("nan"), on_step=lambda: None
        )
        results.append(rankers.state_dict())
        for loss in ("edge_loss", "rerank_loss", "recall_loss"):
            assert log[-1][loss] < log[0][loss]
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
