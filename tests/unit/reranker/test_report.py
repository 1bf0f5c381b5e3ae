"""What a training reports beside its AUC: calibration, segments, pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from edge_ranker.tables import Tables
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut
from reranker.evaluate import Scores, Trial, make_trial, score_trial
from reranker.plots import write_plots
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.report import head_items, quality, segment_report
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return cut(small_dataset(n_events=900))


@pytest.fixture(scope="module")
def rankers(timeline: Timeline) -> Rankers:
    torch.manual_seed(0)
    return Rankers(Tables(SCHEMA, timeline)).eval()


@pytest.fixture(scope="module")
def trial(timeline: Timeline) -> Trial:
    return make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), n_negatives=20)


@pytest.fixture(scope="module")
def scores(timeline: Timeline, rankers: Rankers, trial: Trial) -> Scores:
    return score_trial(rankers, timeline, trial)


def test_the_head_are_the_most_popular_items_with_half_of_the_events() -> None:
    assert head_items(np.array([1, 50, 0, 30, 19])).tolist() == [False, True, False, False, False]
    assert head_items(np.array([1, 49, 0, 30, 20])).tolist() == [False, True, False, True, False]
    assert head_items(np.array([5, 0])).tolist() == [True, False]


def test_segments_part_the_test_events_and_measure_each_part(timeline: Timeline, scores: Scores, trial: Trial) -> None:
    nobody = np.zeros(len(timeline.dataset.user_ids), np.bool_)
    report = segment_report(scores, timeline, trial, nobody, 4.0)
    assert report["users"]["old"] == {"n_test_events": 0, "models": {}}
    assert report["users"]["new"]["n_test_events"] == trial.events.size
    head, tail = report["items"]["head"], report["items"]["tail"]
    assert head["n_test_events"] + tail["n_test_events"] == trial.events.size
    assert min(head["n_test_events"], tail["n_test_events"]) > 0
    counts = timeline.item_counts()
    taken = counts[timeline.dataset.item[trial.events]]
    rows = head_items(counts)[timeline.dataset.item[trial.events]]
    assert taken[rows].min() >= taken[~rows].max()
    for segment in (head, tail):
        assert set(segment["models"]) == {"edge", "rerank"}
        assert set(segment["models"]["edge"]["uniform"]) == {"auc", "gauc", "ndcg_at_10", "log_loss"}


def test_the_plots_show_the_report(
    timeline: Timeline, rankers: Rankers, scores: Scores, trial: Trial, tmp_path: Path
) -> None:
    report = {
        **quality(scores, rankers, timeline, trial, replace(Recipe(), negatives_per_kind=2)),
        "passes": [{"pass": n, "edge_loss": 0.5, "rerank_loss": 0.4, "validation_auc": float("nan")} for n in (1, 2)],
        "compared_with": {
            "release": "<old> & wise",
            "differences": {"edge": {"uniform": {"auc": {"low": -0.1, "high": 0.2}}}},
        },
    }
    assert 0 <= report["calibration"]["edge"]["error"] <= 1
    files = write_plots(report, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["calibration.svg", "passes.svg", "segments.svg", "differences.svg"]
    texts = {}
    for file in files:
        root = ElementTree.fromstring(file.read_text())
        texts[file.stem] = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    error = report["calibration"]["rerank"]["error"]
    assert f"rerank (error {error:.3f})" in texts["calibration"]
    assert "items tail" in texts["segments"]
    assert "<old> & wise" in texts["differences"]
