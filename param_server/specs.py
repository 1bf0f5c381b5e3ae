"""The TableSpecs of a release: for shards that build its tables and for clients that answer in their place.

Reads only the manifest and the default rows; imports nothing compiled, so that a gateway can use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from safetensors import safe_open

from infra.errors import ReleaseRefused
from infra.release import Release, TableEntry
from param_server.contract import F32, TableSpec


def table_specs(
    release: Release, *, n_shards: int = 1, headroom: float = 1.0, min_capacity_rows: int = 1
) -> Mapping[str, TableSpec]:
    """Return the spec of every table, by name. `headroom` is capacity over the release's rows.

    Raises ReleaseRefused when a table is of a type or shape that no shard can hold.
    """
    return {
        entry.name: TableSpec(
            name=entry.name,
            table_id=entry.table_id,
            dim=entry.dim,
            capacity_rows=max(min_capacity_rows, math.ceil(entry.rows / n_shards * headroom), 1),
            default_row=_default_row(release, entry),
            dtype=entry.dtype,
        )
        for entry in release.manifest.tables
    }


def _default_row(release: Release, entry: TableEntry) -> F32:
    if entry.dtype != "f32":
        raise ReleaseRefused(f"{release.path}: table {entry.name} holds {entry.dtype}, a shard holds f32")
    with safe_open(release.path / f"tables/{entry.name}.safetensors", framework="numpy") as tensors:
        row: F32 = np.asarray(tensors.get_tensor("default_row"))
    if row.shape != (entry.dim,) or row.dtype != np.float32 or not np.isfinite(row).all():
        raise ReleaseRefused(f"{release.path}: the default row of table {entry.name} is no finite f32[{entry.dim}]")
    return row
