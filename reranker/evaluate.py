"""What the trained models are worth on a period they have not seen, against popularity.

Each test event is ranked among items its user never touched, drawn uniformly and by popularity; histories are what
came before the event. Users without a row are ranked by their bucket, items without one by the default row, as in
serving. Refuses nothing. Invariant: nothing here changes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edge_ranker.quality import auc, measure
from edge_ranker.samples import make_batch
from feature_service.negatives import KINDS, Kind, Negatives
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline
from reranker.rankers import Rankers

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

N_NEGATIVES = 199
RECALL_DEPTHS = (100, 500)
# Users per forward pass: 64 x 399 candidates fit the caches.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """Events to rank: numbers i64[R], and per kind of negatives the items i64[R, n] they are ranked among."""

    events: I64
    negatives: dict[Kind, I64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of edge and rerank: the taken item f32[R], negatives per kind f32[R, n]; recall rank i64[R] of the
    taken item among all trained items that are not in the history (a large number when it has no row)."""

    taken: dict[str, F32]
    negatives: dict[str, dict[Kind, F32]]
    recall_rank: I64


def spread_over_users(timeline: Timeline, events: I64, most: int, rng: np.random.Generator) -> I64:
    """At most `most` of `events`, as evenly from all their users as they allow, in ascending order."""
    shuffled = rng.permutation(events)
    users = timeline.dataset.user[shuffled]
    order = np.argsort(users, kind="stable")
    turn = np.empty(order.size, np.int64)
    _, first, counts = np.unique(users[order], return_index=True, return_counts=True)
    turn[order] = np.arange(order.size) - np.repeat(first, counts)
    return np.sort(shuffled[np.argsort(turn, kind="stable")[:most]])


def make_trial(
    timeline: Timeline, counts: I64, events: I64, rng: np.random.Generator, n_negatives: int = N_NEGATIVES
) -> Trial:
    """Draw the negatives: trained items (`counts` > 0) their users touch at no time. Events of users who have touched
    every item are left out."""
    data = timeline.dataset
    source = Negatives(counts, data.user, data.item)
    users = data.user[events]
    drawn = {kind: source.draw(rng, users, n_negatives, kind) for kind in KINDS}
    usable = np.logical_and.reduce([valid.all(axis=1) for _, valid in drawn.values()])
    return Trial(events[usable], {kind: items[usable] for kind, (items, _) in drawn.items()})


@torch.no_grad()
def score_trial(rankers: Rankers, timeline: Timeline, trial: Trial) -> Scores:
    """Rank every event of the trial."""
    schema, data = rankers.tables.schema, timeline.dataset
    candidates = np.concatenate([data.item[trial.events][:, None], *trial.negatives.values()], axis=1)
    edge, rerank, ranks = [], [], []
    for start in range(0, trial.events.size, _CHUNK):
        events = trial.events[start : start + _CHUNK]
        without_row = ~rankers.tables.trained_users[data.user[events]]
        batch = make_batch(timeline, schema, events, candidates[start : start + _CHUNK], without_row)
        batch = batch.to(rankers.tables.item.device)
        encoded = rankers.encode(batch)
        edge.append(rankers.edge_logits(encoded).cpu().numpy())
        rerank.append(rankers.rank_logits(encoded).cpu().numpy())
        ranks.append(_recall_ranks(rankers, timeline, schema, events, encoded.query.cpu().numpy()))
    logits = {"edge": np.concatenate(edge), "rerank": np.concatenate(rerank)}
    bounds = np.cumsum([1, *(items.shape[1] for items in trial.negatives.values())])
    return Scores(
        taken={model: scores[:, 0] for model, scores in logits.items()},
        negatives={
            model: {kind: scores[:, bounds[i] : bounds[i + 1]] for i, kind in enumerate(trial.negatives)}
            for model, scores in logits.items()
        },
        recall_rank=np.concatenate(ranks),
    )


def quality_report(
    scores: Scores, timeline: Timeline, trial: Trial, log_loss_negatives: float
) -> dict[str, dict[str, dict[str, float | None]]]:
    """model -> kind of negatives -> measures, popularity (training events) being the third model."""
    popular = timeline.item_counts().astype(np.float32)
    taken = popular[timeline.dataset.item[trial.events]]
    report: dict[str, dict[str, dict[str, float | None]]] = {"edge": {}, "rerank": {}, "popularity": {}}
    for kind, items in trial.negatives.items():
        for model in ("edge", "rerank"):
            quality = measure(scores.taken[model], scores.negatives[model][kind], log_loss_negatives)
            report[model][kind] = quality.as_dict()
        report["popularity"][kind] = measure(taken, popular[items]).as_dict()
    return report


def recall_report(scores: Scores, timeline: Timeline, trial: Trial, schema: FeatureSchema) -> dict[str, float]:
    """Share of events whose item is among the first k of the exact dot-product recall, and of the most popular."""
    popular = timeline.item_counts().astype(np.float32)
    popular[popular == 0] = -np.inf
    chunks = [trial.events[start : start + _CHUNK] for start in range(0, trial.events.size, _CHUNK)]
    by_popularity = np.concatenate([_ranks(np.tile(popular, (c.size, 1)), timeline, schema, c) for c in chunks])
    return {
        **{f"recall@{k}": round(float((scores.recall_rank < k).mean()), 5) for k in RECALL_DEPTHS},
        **{f"popularity_recall@{k}": round(float((by_popularity < k).mean()), 5) for k in RECALL_DEPTHS},
    }


def validation_auc(rankers: Rankers, timeline: Timeline, trial: Trial) -> float:
    """Mean AUC over both rankers and both kinds of negatives; NaN when there is nothing to rank."""
    if trial.events.size == 0:
        return float("nan")
    scores = score_trial(rankers, timeline, trial)
    values = [auc(scores.taken[m], n.ravel()) for m, kinds in scores.negatives.items() for n in kinds.values()]
    return float(np.mean(values))


def _recall_ranks(rankers: Rankers, timeline: Timeline, schema: FeatureSchema, events: I64, queries: F32) -> I64:
    items = rankers.tables.trained_items
    scores = np.full((events.size, len(timeline.dataset.item_ids)), -np.inf, np.float32)
    scores[:, items] = queries @ rankers.tables.item.detach().cpu().numpy().T
    return _ranks(scores, timeline, schema, events)


def _ranks(scores: F32, timeline: Timeline, schema: FeatureSchema, events: I64) -> I64:
    """Items that stand before the taken one; what is in the history serving keeps stands aside."""
    taken_items = timeline.dataset.item[events]
    taken = scores[np.arange(events.size), taken_items]
    histories = timeline.histories(schema, events)
    rows, columns = np.nonzero(histories.mask)
    scores[rows, histories.items[rows, columns]] = -np.inf
    scores[np.arange(events.size), taken_items] = -np.inf
    before: I64 = (scores >= taken[:, None]).sum(axis=1)
    return np.where(np.isfinite(taken), before, np.iinfo(np.int64).max)
