"""What a release says of its training: quality on the test period, the split, and a summary for people.

Refuses nothing. Invariant: every number is of the test period, which no part of the training has seen.
"""

from __future__ import annotations

from typing import Any

from feature_service.timeline import Timeline
from infra.engine.quality import refused_in
from infra.release import Release
from reranker.evaluate import N_NEGATIVES, Trial, quality_report, recall_report, score_trial
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.source import TrainingLog


def quality(rankers: Rankers, timeline: Timeline, trial: Trial, recipe: Recipe) -> dict[str, Any]:
    scores = score_trial(rankers, timeline, trial)
    return {
        "n_test_events": int(trial.events.size),
        "negatives_per_event": N_NEGATIVES,
        "models": quality_report(scores, timeline, trial, 2.0 * recipe.negatives_per_kind),
        "recall": recall_report(scores, timeline, trial, rankers.tables.schema),
    }


def split_report(log: TrainingLog, timeline: Timeline, trial: Trial) -> dict[str, Any]:
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
    lines += [f"  {sentence}" for sentence in refused_in(report["precisions"])]
    lines.append(f"release {release.manifest.name} in {release.path}, trained in {report['seconds']['training']:.0f} s")
    return "\n".join(lines)
