"""A trained model beside an earlier release: the same requests of the same test period, ranked by both.

The earlier release ranks as it would serve: ids it does not know get its default rows and buckets.
Refuses a release that was trained on part of the test period, which would flatter it. Invariant: both rank the same
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_ranker.bootstrap import LEVEL, Difference, paired_differences
from feature_service.timeline import Timeline
from infra.errors import ReleaseRefused
from infra.release import Release
from reranker.evaluate import Scores, Trial
from reranker.offline import scorer_of
from reranker.package import request_of

F32 = NDArray[np.float32]

MODELS = ("edge", "rerank")
Comparison = dict[str, dict[str, dict[str, Difference]]]


def check_comparable(other: Release, test_from: str) -> None:
    """Raise ReleaseRefused when `other` knows more than what lies before the moment `test_from`, or hides it."""
    theirs = other.manifest.report.get("split", {}).get("test_from")
    if theirs is None:
        raise ReleaseRefused(f"{other.path}: its report does not say where its training period ends; compare another")
    if datetime.fromisoformat(theirs) > datetime.fromisoformat(test_from):
        raise ReleaseRefused(
            f"{other.path}: it was trained on events until {theirs}, part of this test period (from {test_from}); "
            "compare a release that was trained on the same or an earlier log"
        )


def compare(
    scores: Scores,
    other: Release,
    timeline: Timeline,
    trial: Trial,
    max_history: int,
    rng: np.random.Generator,
    *,
    on_request: Callable[[], None] = lambda: None,
) -> Comparison:
    """model -> kind of negatives -> measure -> difference between `scores` and those of `other`."""
    theirs = _scores_of(other, timeline, trial, max_history, on_request)
    users = timeline.dataset.user[trial.events]
    found: Comparison = {}
    for model in MODELS:
        begin, found[model] = 1, {}
        for kind, items in trial.negatives.items():
            end = begin + items.shape[1]
            found[model][kind] = paired_differences(
                (scores.taken[model], scores.negatives[model][kind]),
                (theirs[model][:, 0], theirs[model][:, begin:end]),
                users,
                rng,
            )
            begin = end
    return found


def in_report(found: Comparison, other: Release) -> dict[str, Any]:
    """For the manifest."""
    return {
        "release": other.manifest.name,
        "generation": other.manifest.generation,
        "interval": LEVEL,
        "differences": {
            model: {kind: {m: d.as_dict() for m, d in measures.items()} for kind, measures in kinds.items()}
            for model, kinds in found.items()
        },
    }


def lines_of(report: dict[str, Any]) -> list[str]:
    """What `in_report` gave, for people."""
    lines = [f"beside release {report['release']}, difference and {report['interval']:.0%} interval over users:"]
    for model, kinds in report["differences"].items():
        for kind, measures in kinds.items():
            for measure, d in measures.items():
                verdict = "" if d["low"] <= 0 <= d["high"] else "  better" if d["difference"] > 0 else "  worse"
                numbers = f"{d['theirs']:.4f} -> {d['ours']:.4f}  {d['difference']:+.4f}"
                lines.append(
                    f"  {model:<7} {kind:<11} {measure:<11} {numbers} [{d['low']:+.4f}, {d['high']:+.4f}]{verdict}"
                )
    return lines


def _scores_of(
    other: Release, timeline: Timeline, trial: Trial, max_history: int, on_request: Callable[[], None]
) -> dict[str, F32]:
    """Logits f32[R, 1 + negatives of all kinds] of both models of another release; column 0 was taken."""
    data, scorer = timeline.dataset, scorer_of(other)
    candidates = np.concatenate([data.item[trial.events][:, None], *trial.negatives.values()], axis=1)
    found: dict[str, list[F32]] = {model: [] for model in MODELS}
    for event, items in zip(trial.events.tolist(), candidates, strict=True):
        request = request_of(timeline, event, items, max_history)
        for model, logits in zip(MODELS, scorer.score(request), strict=True):
            found[model].append(logits)
        on_request()
    return {model: np.stack(logits) for model, logits in found.items()}
