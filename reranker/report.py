"""What a release says of its training: quality on the test period, the split, and a summary for people.

Refuses nothing. Invariant: every number is of the test period, which no part of the training has seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_ranker.calibration import calibration
from edge_ranker.quality import measure
from feature_service.timeline import Timeline
from infra.engine.quality import refused_in
from infra.release import Release
from reranker.compare import lines_of
from reranker.evaluate import N_NEGATIVES, Scores, Trial, quality_report, recall_report
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.source import TrainingLog

I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

# The most popular items that have this share of the training events are the head, all others the tail.
HEAD_SHARE = 0.5
MODELS = ("edge", "rerank")


def quality(scores: Scores, rankers: Rankers, timeline: Timeline, trial: Trial, recipe: Recipe) -> dict[str, Any]:
    """Measures of both models and of popularity, of the recall, by segment, and the calibration."""
    together = 2.0 * recipe.negatives_per_kind
    return {
        "n_test_events": int(trial.events.size),
        "negatives_per_event": N_NEGATIVES,
        "models": quality_report(scores, timeline, trial, together),
        "recall": recall_report(scores, timeline, trial, rankers.tables.schema),
        "calibration": calibration_report(scores, recipe),
        "segments": segment_report(scores, timeline, trial, rankers.tables.trained_users, together),
    }


def calibration_report(scores: Scores, recipe: Recipe) -> dict[str, Any]:
    """Calibration of each model at the ratio of taken items to both kinds of negatives it was trained at."""
    weight = float(recipe.negatives_per_kind)
    return {
        model: calibration(
            scores.taken[model], [(negative, weight) for negative in scores.negatives[model].values()]
        ).as_dict()
        for model in MODELS
    }


def segment_report(
    scores: Scores, timeline: Timeline, trial: Trial, trained_users: BOOL, log_loss_negatives: float
) -> dict[str, Any]:
    """The measures among test events of head and tail items, of users with a row of their own (old) and without (new).
    A segment nobody is in has no models."""
    data = timeline.dataset
    head = head_items(timeline.item_counts())[data.item[trial.events]]
    old = trained_users[data.user[trial.events]]
    chosen = {"items": {"head": head, "tail": ~head}, "users": {"old": old, "new": ~old}}
    return {
        of: {
            name: {"n_test_events": int(rows.sum()), "models": _measured(scores, rows, log_loss_negatives)}
            for name, rows in segments.items()
        }
        for of, segments in chosen.items()
    }


def head_items(counts: I64) -> BOOL:
    """Which items are the head, bool[n_items], by their training events."""
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    head = np.zeros(counts.size, np.bool_)
    head[order] = (before < HEAD_SHARE * counts.sum()) & (counts[order] > 0)
    return head


def _measured(scores: Scores, rows: BOOL, log_loss_negatives: float) -> dict[str, Any]:
    if not rows.any():
        return {}
    return {
        model: {
            kind: measure(scores.taken[model][rows], negative[rows], log_loss_negatives).as_dict()
            for kind, negative in scores.negatives[model].items()
        }
        for model in MODELS
    }


def split_report(log: TrainingLog, timeline: Timeline, trial: Trial) -> dict[str, Any]:
    """The cut in time, and what of the test period training has not seen."""
    items = timeline.dataset.item[trial.events]
    return {**log.split(), "ranked_items_without_row": int((log.fitted().item_counts()[items] == 0).sum())}


def summary(release: Release) -> str:
    """What a person wants to know of a trained release, in a few lines."""
    report = release.manifest.report
    lines = [f"{report['n_test_events']} test events after {report['split']['test_from']}, AUC uniform / popularity:"]
    for model, by_kind in report["models"].items():
        lines.append(f"  {model:<10} {by_kind['uniform']['auc']:.4f} / {by_kind['popularity']['auc']:.4f}")
    recall = ", ".join(f"{name} {value:.3f}" for name, value in report["recall"].items())
    lines.append(f"  {recall}")
    waits = [entry["data_wait_share"] for entry in report["passes"]]
    lines.append(f"  {len(waits)} passes in {report['precision']}, {max(waits):.0%} of the time waiting for data")
    errors = ", ".join(f"{model} {found['error']:.3f}" for model, found in report["calibration"].items())
    lines.append(f"  calibration error {errors}")
    lines += [f"  {sentence}" for sentence in refused_in(report["precisions"])]
    if "compared_with" in report:
        lines += lines_of(report["compared_with"])
    lines.append(f"release {release.manifest.name} in {release.path}, trained in {report['seconds']['training']:.0f} s")
    return "\n".join(lines)
