"""Another model over the tables of a release: checked, exported, judged on the same data, released under a new name.

Refuses data the release was not made from, and models that do not keep the contract (`infra.engine.ranker_contract`).
Invariant: the release that is written went through the same packaging as a trained one: recorded requests, precisions
and quality are those of its own models, and nothing of the source's scores is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from edge_ranker.tables import Log, Tables
from feature_service.load import load_dataset
from feature_service.schema import TABLE_IDS, FeatureSchema, schema_of
from infra.clock import Clock, SystemClock
from infra.engine.ranker_contract import check_ranker
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import ROLES, Release, Role
from infra.release_name import check_name
from reranker.architectures import Architecture, own_model
from reranker.compare import compare, in_report, lines_of
from reranker.evaluate import score_trial
from reranker.own import module_of
from reranker.package import package_release
from reranker.precisions import RULES, Rules
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.working import RowIndex
from reranker.report import quality, split_report
from reranker.source import LogInMemory
from reranker.threads import one_thread_per_operation

# Of the source's report: what is made anew, or was of its training alone.
_NOT_KEPT = ("precisions", "passes", "seconds", "recipe", "precision", "rows_elsewhere", "compared_with")


def replace_models(
    source: Release,
    data: str,
    out: Path,
    *,
    models: Mapping[Role, str],
    cache: Path,
    name: str | None = None,
    rules: Rules = RULES,
    clock: Clock | None = None,
    console: Console | None = None,
) -> Release:
    """Write `out`: the tables of `source` under `models`, each a .pt2 or .onnx file or `package.module:factory`; the
    other ranker stays. `data` is what the source was made from. Raises InvalidInput, ReleaseRefused, ModelRefused."""
    if out.exists():
        raise ReleaseRefused(f"{out} exists already; a release is never overwritten: choose another name")
    check_name(name or out.name)
    if not models:
        raise InvalidInput("rerank", "no model is given; give --edge, --rerank or both")
    manifest, clock = source.manifest, clock or SystemClock()
    schema = schema_of(manifest.schema, manifest.schema_fingerprint)
    chosen = {role: _chosen(role, models[role], schema) for role in ROLES if role in models}
    log = LogInMemory(load_dataset(data, cache))
    if log.known.fingerprint != manifest.report["data_fingerprint"]:
        raise InvalidInput("data", f"release {manifest.name} was not made from {data}: the quality would mean nothing")
    rng, recipe = np.random.default_rng(manifest.report["seed"]), Recipe()
    rankers = Rankers(_tables(source, schema, log.fitted())).eval()
    ready = {role: source.path / manifest.models[role]["fp32"] for role in ROLES if role not in chosen}
    for role in ROLES:
        module = chosen[role] if role in chosen else module_of(ready[role])
        setattr(rankers, role, module)
        if role in chosen:
            rankers.architectures[role] = Architecture(_named(models[role]))
            ready |= {role: Path(models[role])} if models[role].endswith(".onnx") else {}
    with one_thread_per_operation():
        timeline, trial = log.test(rng)
        scores = score_trial(rankers, timeline, trial)
        report = {
            **{key: value for key, value in manifest.report.items() if key not in _NOT_KEPT},
            **quality(scores, rankers, timeline, trial, recipe),
            "split": split_report(log, timeline, trial),
            "replaced": {role: _named(given) for role, given in models.items()},
            "compared_with": in_report(
                compare(scores, source, timeline, trial, schema.max_history, np.random.default_rng(0)), source
            ),
        }
        release = package_release(
            rankers,
            timeline,
            trial,
            report,
            out,
            log=log,
            name=name,
            rng=rng,
            clock=clock,
            rules=replace(rules, scales={}),
            ready=ready,
            parent=manifest.name,
            architectures=_architectures(source, rankers, chosen),
        )
    lines = [f"release {release.manifest.name} in {release.path}", *lines_of(release.manifest.report["compared_with"])]
    (console or Console(stderr=True, soft_wrap=True)).print("\n".join(lines), highlight=False)
    return release


def _chosen(role: Role, given: str, schema: FeatureSchema) -> nn.Module:
    if ":" in given and not Path(given).exists():
        return own_model(role, given, schema)
    module = module_of(Path(given))
    check_ranker(module, given, token_dim=schema.token_dim, user_dim=schema.user_dim)
    return module


def _named(given: str) -> str:
    """A factory by its name, a file by its name and contents."""
    if ":" in given and not Path(given).exists():
        return given
    digest = hashlib.sha256(Path(given).read_bytes()).hexdigest()[:16]
    return f"{Path(given).name} sha256 {digest}"


def _architectures(source: Release, rankers: Rankers, chosen: Mapping[Role, nn.Module]) -> dict[str, Any]:
    """What the manifest says: the source's entry for a ranker that stays."""
    known = source.manifest.made_with.get("architectures", {})
    mine = {role: asdict(architecture) for role, architecture in rankers.architectures.items()}
    return {role: mine[role] if role in chosen else known.get(role, mine[role]) for role in ROLES}


def _tables(source: Release, schema: FeatureSchema, log: Log) -> Tables:
    """Tables with the rows of the release. Raises ReleaseRefused when it has not those of this log."""
    tables = Tables(schema, log, sparse=())
    index = RowIndex(tables)
    trained = index.trained()
    for name in TABLE_IDS:
        rows = source.table(name)
        place = {key: i for i, key in enumerate(rows.keys.tolist())}
        numbers = trained[name]
        at = np.array([place.get(key, -1) for key in index.keys[name][numbers].tolist()], np.int64)
        if (at < 0).any():
            raise ReleaseRefused(f"{source.path}: table {name} lacks {int((at < 0).sum())} rows of this data")
        whole = torch.zeros(index.keys[name].size, schema.table_dim(name))
        whole[torch.from_numpy(numbers)] = torch.from_numpy(rows.rows[at])
        setattr(tables, name, nn.Parameter(whole))
    return tables
