"""A release with empty tables and untrained models: what a stack is started with to hold the rows of a training.

It says so in its manifest (`made_with["rows"]`), and a training takes its rows from no other: the rows of a release
that serves users would move under models that were trained on other values. Refuses to overwrite.
"""

from __future__ import annotations

import platform
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from feature_service.load import load_dataset
from feature_service.schema import TABLE_IDS, FeatureSchema
from infra.clock import Clock, SystemClock
from infra.engine.export import export_ranker
from infra.errors import ReleaseRefused
from infra.release import Release, Role, TableRows, write_release
from infra.release_name import check_name
from reranker.architectures import EDGE, RERANK, build_edge, build_rerank
from reranker.package import catalogue_of
from reranker.remote.rows import RowsRefused
from reranker.source import LogInMemory
from reranker.train import schema_for

ROWS_ELSEWHERE = "trained in the parameter server"


def empty_release(
    data: str, out: Path, *, cache: Path, seed: int, name: str | None = None, clock: Clock | None = None
) -> Release:
    """Write the release directory `out` for a training on `data`. Raises InvalidInput, ReleaseRefused."""
    if out.exists():
        raise ReleaseRefused(f"{out} exists already; a release is never overwritten: choose another name")
    check_name(name or out.name)
    log = LogInMemory(load_dataset(data, cache))
    schema = schema_for(log.n_users(), log.known)
    timeline, _ = log.test(np.random.default_rng(seed))
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        untrained: dict[Role, nn.Module] = {"edge": build_edge(EDGE, schema), "rerank": build_rerank(RERANK, schema)}
        models: dict[Role, Path] = {role: Path(folder) / f"{role}.onnx" for role in untrained}
        for role, model in untrained.items():
            export_ranker(model, models[role], token_dim=schema.token_dim, user_dim=schema.user_dim)
        return write_release(
            out,
            name=name or out.name,
            parent=None,
            created_us=(clock or SystemClock()).now_us(),
            schema=asdict(schema),
            schema_fingerprint=schema.fingerprint(),
            tables={table: (table_id, _no_rows(schema, table)) for table, table_id in TABLE_IDS.items()},
            models={role: {"fp32": file} for role, file in models.items()},
            catalogue=catalogue_of(timeline),
            users=log.users(schema.max_history),
            requests=(),
            report={"data": log.known.name, "data_fingerprint": log.known.fingerprint, "seed": seed, "models": {}},
            made_with={
                "architectures": {"edge": asdict(EDGE), "rerank": asdict(RERANK)},
                "rows": ROWS_ELSEWHERE,
                "python": platform.python_version(),
            },
        )


def check_holds_no_trained_rows(release: Release) -> None:
    """Raises RowsRefused unless a training may change the rows of this release."""
    if release.manifest.made_with.get("rows") != ROWS_ELSEWHERE:
        raise RowsRefused(
            f"the stack serves release {release.manifest.name}, and a training would change its rows under its models; "
            "start one (another --home and port) with a release that `trirank train --empty-tables` made"
        )


def _no_rows(schema: FeatureSchema, table: str) -> TableRows:
    dim = schema.table_dim(table)
    return TableRows(
        np.empty(0, np.int64), np.empty((0, dim), np.float32), np.empty(0, np.uint64), np.zeros(dim, np.float32)
    )
