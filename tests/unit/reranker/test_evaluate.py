"""Evaluation: who is asked, against what, and the rank in the recall by counting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_ranker.tables import Tables
from feature_service.dataset import make_dataset
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut
from reranker.evaluate import make_trial, quality_report, recall_report, score_trial, spread_over_users, validation_auc
from reranker.fit import Rankers
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)


@pytest.fixture
def timeline() -> Timeline:
    return cut(small_dataset(n_events=900))


@pytest.fixture
def rankers(timeline: Timeline) -> Rankers:
    torch.manual_seed(0)
    return Rankers(Tables(SCHEMA, timeline)).eval()


def test_events_are_taken_evenly_from_all_users(timeline: Timeline) -> None:
    users = timeline.dataset.user
    most = 40
    chosen = spread_over_users(timeline, timeline.test, most, np.random.default_rng(0))
    assert chosen.size == np.unique(chosen).size == most
    assert set(chosen.tolist()) <= set(timeline.test.tolist())
    has, got = np.bincount(users[timeline.test], minlength=20), np.bincount(users[chosen], minlength=20)
    rounds = got.max()
    assert (got >= np.minimum(has, rounds - 1)).all()
    everything = spread_over_users(timeline, timeline.test, 10**6, np.random.default_rng(0))
    assert everything.tolist() == timeline.test.tolist()


def test_negatives_are_trained_items_the_user_never_touches_not_even_later(timeline: Timeline) -> None:
    data, counts = timeline.dataset, timeline.item_counts()
    trial = make_trial(timeline, counts, timeline.test, np.random.default_rng(0), n_negatives=20)
    touched = set(zip(data.user.tolist(), data.item.tolist(), strict=True))
    for items in trial.negatives.values():
        assert items.shape == (trial.events.size, 20)
        for event, row in zip(trial.events.tolist(), items.tolist(), strict=True):
            assert not any((data.user[event], i) in touched or counts[i] == 0 for i in row)


def test_events_of_users_who_touched_everything_are_left_out() -> None:
    data = make_dataset(
        "two",
        users=["complete", "picky"] * 100,
        items=[f"i{n % 10}" if n % 2 else f"j{n % 3}" for n in range(100) for _ in range(2)],
        ts_us=np.arange(200) * 1_000_000,
        events=["click"] * 200,
        facts={},
        attributes={},
        fingerprint="",
    )
    data = replace(data, item=np.where(data.user == 0, data.item, data.item % 3))
    timeline = cut(data)
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0))
    assert set(data.user[timeline.test].tolist()) == {0, 1}
    assert set(data.user[trial.events].tolist()) == {1}


def test_scores_are_those_of_the_models_row_by_row(timeline: Timeline, rankers: Rankers) -> None:
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), n_negatives=9)
    together = score_trial(rankers, timeline, trial)
    for row in (0, trial.events.size - 1):
        alone = score_trial(
            rankers,
            timeline,
            type(trial)(trial.events[[row]], {kind: items[[row]] for kind, items in trial.negatives.items()}),
        )
        for model in ("edge", "rerank"):
            np.testing.assert_allclose(alone.taken[model][0], together.taken[model][row], atol=1e-5)
            for kind in trial.negatives:
                np.testing.assert_allclose(
                    alone.negatives[model][kind][0], together.negatives[model][kind][row], atol=1e-5
                )


def test_an_untrained_model_is_worth_nothing_and_popularity_what_it_is(timeline: Timeline, rankers: Rankers) -> None:
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0))
    report = quality_report(score_trial(rankers, timeline, trial), timeline, trial, 4.0)
    assert set(report) == {"edge", "rerank", "popularity"}
    for by_kind in report.values():
        assert set(by_kind) == {"uniform", "popularity"}
        for measures in by_kind.values():
            auc = measures["auc"]
            assert auc is not None
            assert 0.3 < auc < 0.7
    assert report["popularity"]["uniform"]["log_loss"] is None
    assert 0.3 < validation_auc(rankers, timeline, trial) < 0.7


def test_recall_counts_the_items_before_the_taken_one(timeline: Timeline, rankers: Rankers) -> None:
    data = timeline.dataset
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), n_negatives=2)
    scores = score_trial(rankers, timeline, trial)
    item = rankers.tables.item.detach().numpy()
    for row, event in enumerate(trial.events.tolist()):
        history = data.item[max(data.first[data.user[event]], event - SCHEMA.max_history) : event]
        users, as_bucket = torch.tensor([data.user[event]]), torch.tensor([False])
        query = rankers.tables.users(users, as_bucket).detach().numpy()[0]
        query = query + (item[history].mean(axis=0) if history.size else 0)
        products = item @ query
        taken = data.item[event]
        others = [i for i in range(30) if i != taken and i not in history.tolist()]
        if taken not in history:
            assert scores.recall_rank[row] == (products[others] >= products[taken]).sum()
    report = recall_report(scores, timeline, trial, SCHEMA)
    assert set(report) == {"recall@100", "recall@500", "popularity_recall@100", "popularity_recall@500"}


def test_nothing_to_rank_gives_no_verdict(timeline: Timeline, rankers: Rankers) -> None:
    trial = make_trial(timeline, timeline.item_counts(), timeline.test[:0], np.random.default_rng(0))
    assert np.isnan(validation_auc(rankers, timeline, trial))
