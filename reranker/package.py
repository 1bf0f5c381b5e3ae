"""Trained models become a release directory, with recorded requests that prove what it computes.

Refuses to write when a recorded request gets other logits from the exported models over assembled rows than from the
trained ones. Invariant: the logits in the release come from the files in the release.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_ranker.samples import make_batch
from feature_service.hashing import ITEM, keys_of
from feature_service.recorded import RecordedFeatures
from feature_service.timeline import Timeline
from infra.clock import Clock
from infra.engine.export import export_ranker
from infra.engine.onnx_cpu import OnnxEngine
from infra.errors import ReleaseRefused
from infra.release import Item, RecordedRequest, Release, Role, write_release
from reranker.evaluate import Trial
from reranker.offline import OfflineScorer
from reranker.precisions import LOG_LOSS_NEGATIVES, RULES, Rules, make_precisions
from reranker.rankers import Rankers
from reranker.source import TrainingLog, user_state

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

RECORDED_REQUESTS = 200
RECORDED_CANDIDATES = 100
# What float32 summed in another order may differ by.
PARITY = 1e-4
_MADE_WITH = ("trirank", "torch", "onnx", "onnxscript", "onnxruntime", "numpy", "polars")


def package_release(
    rankers: Rankers,
    timeline: Timeline,
    trial: Trial,
    report: Mapping[str, Any],
    out: Path,
    *,
    log: TrainingLog,
    name: str | None,
    rng: np.random.Generator,
    clock: Clock,
    rules: Rules = RULES,
    log_loss_negatives: float = LOG_LOSS_NEGATIVES,
    ready: Mapping[Role, Path] | None = None,
    parent: str | None = None,
    architectures: Mapping[str, Any] | None = None,
) -> Release:
    """Export, record requests of the trial, make the precisions that `rules` let through, check, and write the release.
    Raises ReleaseRefused.

    `log` knows all users with their histories at the end of the training period; without a `name` the release is called
    as its folder. `log_loss_negatives` is what the negatives of a request weigh together, as in training. `ready` are
    FP32 graphs that need no export, `parent` the release this one was made from, `architectures` what the manifest says
    of the models (None: what `rankers` says).
    """
    schema = rankers.tables.schema
    tables = rankers.tables.release_tables()
    catalogue = catalogue_of(timeline)
    with tempfile.TemporaryDirectory() as folder:
        models: dict[Role, Path] = {"edge": Path(folder) / "mlp.onnx", "rerank": Path(folder) / "bst.onnx"}
        export_difference: dict[Role, float] = {}
        trained: dict[Role, nn.Module] = {"edge": rankers.edge, "rerank": rankers.rerank}
        for role, model in trained.items():
            if ready is not None and role in ready:
                shutil.copyfile(ready[role], models[role])
                continue
            export_difference[role] = export_ranker(
                model, models[role], token_dim=schema.token_dim, user_dim=schema.user_dim
            )
        features = RecordedFeatures(
            schema,
            {table: rows for table, (_, rows) in tables.items()},
            {item.item_id: item.categories for item in catalogue},
        )
        scorer = OfflineScorer(features, OnnxEngine(models["edge"]), OnnxEngine(models["rerank"]))
        requests, parity = _recorded(rankers, timeline, trial, scorer, rng)
        precisions = make_precisions(
            rankers, timeline, trial, models, rules=rules, log_loss_negatives=log_loss_negatives, rng=rng
        )
        return write_release(
            out,
            name=name or out.name,
            parent=parent,
            created_us=clock.now_us(),
            schema=asdict(schema),
            schema_fingerprint=schema.fingerprint(),
            tables=tables,
            models=precisions.models,
            scales=precisions.scales,
            catalogue=catalogue,
            users=log.users(schema.max_history),
            requests=requests,
            report={
                **report,
                "relative_logit_difference": {"export": export_difference, "served": parity},
                "precisions": precisions.report,
            },
            made_with={
                "architectures": architectures or {role: asdict(a) for role, a in rankers.architectures.items()},
                "python": platform.python_version(),
                **{package: importlib.metadata.version(package) for package in _MADE_WITH},
            },
        )


def catalogue_of(timeline: Timeline) -> list[Item]:
    """Every item the data describes or mentions, most popular in the training period first."""
    data, counts = timeline.dataset, timeline.item_counts()
    keys = keys_of(ITEM, data.item_ids).tolist()
    return [
        Item(data.item_ids[i], keys[i], data.facts[i].title, list(data.facts[i].categories), int(counts[i]))
        for i in np.argsort(-counts, kind="stable").tolist()
    ]


def _recorded(
    rankers: Rankers, timeline: Timeline, trial: Trial, scorer: OfflineScorer, rng: np.random.Generator
) -> tuple[list[RecordedRequest], dict[str, float]]:
    """Requests with the logits of the exported models, and the largest difference to the trained ones."""
    chosen = np.sort(rng.permutation(trial.events.size)[:RECORDED_REQUESTS])
    events = trial.events[chosen]
    candidates = [_candidates(timeline, trial, row, rng) for row in chosen.tolist()]
    requests, worst = [], {"edge": 0.0, "rerank": 0.0}
    for event, items in zip(events.tolist(), candidates, strict=True):
        request = request_of(timeline, event, items, rankers.tables.schema.max_history)
        logits = dict(zip(worst, scorer.score(request), strict=True))
        for model, trained in _trained_logits(rankers, timeline, event, items).items():
            scale = max(1.0, float(np.abs(trained).max()))
            worst[model] = max(worst[model], float(np.abs(trained - logits[model]).max()) / scale)
        requests.append(
            msgspec.structs.replace(
                request, edge_logits=logits["edge"].tolist(), rerank_logits=logits["rerank"].tolist()
            )
        )
    for model, difference in worst.items():
        if not difference <= PARITY:
            raise ReleaseRefused(f"{model}: served features give logits that differ by {difference:.1e} from training")
    return requests, worst


def _candidates(timeline: Timeline, trial: Trial, row: int, rng: np.random.Generator) -> I64:
    """The taken item among distinct untouched ones, shuffled, i64[<= RECORDED_CANDIDATES]."""
    taken = timeline.dataset.item[trial.events[row]]
    drawn = np.concatenate([items[row] for items in trial.negatives.values()])
    others = rng.permutation(np.setdiff1d(drawn, taken))[: RECORDED_CANDIDATES - 1]
    return rng.permutation(np.append(others, taken))


def request_of(timeline: Timeline, event: int, items: I64, max_history: int) -> RecordedRequest:
    """The request before an event, for items i64[N], with the history serving would have had; no logits yet."""
    data = timeline.dataset
    user = int(data.user[event])
    state = user_state(data, data.interactions, user, max(int(data.first[user]), event - max_history), event)
    return RecordedRequest(
        user_id=state.user_id,
        attributes=state.attributes,
        history_items=state.history_items,
        history_ts_us=state.history_ts_us,
        candidates=[data.item_ids[i] for i in items.tolist()],
        edge_logits=[],
        rerank_logits=[],
        taken=data.item_ids[data.item[event]],
    )


@torch.no_grad()
def _trained_logits(rankers: Rankers, timeline: Timeline, event: int, items: I64) -> dict[str, F32]:
    events = np.array([event])
    without_row = ~rankers.tables.trained_users[timeline.dataset.user[events]]
    batch = make_batch(timeline, rankers.tables.schema, events, items[None], without_row)
    encoded = rankers.encode(batch)
    return {
        "edge": rankers.edge_logits(encoded).numpy()[0],
        "rerank": rankers.rank_logits(encoded).numpy()[0],
    }
