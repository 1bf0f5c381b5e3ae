"""The tables of one release inside one shard, and how they are filled at start.

A shard holds the keys that hash to it and no others. Invariant: what `state()` returns and `filled` takes back is the
whole of it, tombstones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.errors import ReleaseRefused
from infra.release import Release
from param_server.contract import F32, I64, U64, Op, TableSpec
from param_server.routing import shard_of
from param_server.specs import table_specs
from param_server.table import EmbeddingTable, Export, RowBatch
from param_server.table.cpu import CpuTable


@dataclass(frozen=True, slots=True)
class Generation:
    """Tables by name and by id; `number` and `schema_fingerprint` are the release's."""

    number: int
    release: str
    schema_fingerprint: str
    created_us: int
    tables: Mapping[str, EmbeddingTable]
    by_id: Mapping[int, EmbeddingTable]

    def state(self) -> dict[str, Export]:
        """Copies of all entries, by table."""
        return {name: table.export() for name, table in self.tables.items()}


class Owns(Protocol):
    """A part of the key space."""

    def owns(self, keys: I64) -> I64:
        """Positions of the keys that belong to it: i64[n] -> i64[m]."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of the key space a shard owns."""

    index: int
    n_shards: int
    n_partitions: int

    def owns(self, keys: I64) -> I64:
        """Positions of the keys that belong here: i64[n] -> i64[m]."""
        return np.flatnonzero(shard_of(keys, self.n_partitions, self.n_shards) == self.index)


def empty_generation(release: Release, place: Place, *, headroom: float, min_capacity_rows: int) -> Generation:
    """Tables without rows. Raises ReleaseRefused."""
    specs = table_specs(release, n_shards=place.n_shards, headroom=headroom, min_capacity_rows=min_capacity_rows)
    tables = {name: _table(spec) for name, spec in specs.items()}
    manifest = release.manifest
    return Generation(
        number=manifest.generation,
        release=manifest.name,
        schema_fingerprint=manifest.schema_fingerprint,
        created_us=manifest.created_us,
        tables=tables,
        by_id={spec.table_id: tables[name] for name, spec in specs.items()},
    )


def fill_from_release(generation: Generation, release: Release, place: Owns) -> None:
    """Put the rows of the release that belong to `place` into tables without any of them. Raises ReleaseRefused."""
    for name, table in generation.tables.items():
        given = release.table(name)
        if not np.isfinite(given.rows).all():
            raise ReleaseRefused(f"{release.path}: table {name} holds a number that is not finite")
        mine = place.owns(given.keys)
        if not _put(table, Op.ASSIGN, given.keys[mine], given.versions[mine], given.rows[mine]):
            raise ReleaseRefused(f"{release.path}: table {name} has more rows here than table_headroom leaves room for")


def fill_from_state(generation: Generation, state: Mapping[str, Export], part: Owns) -> bool:
    """Put the entries of a snapshot that belong to `part` into tables; False when they do not fit.

    What a table holds already is as new or newer and stays: the snapshots of a chain are given newest first.
    """
    for name, table in generation.tables.items():
        entries = state[name]
        mine = part.owns(entries.keys)
        dead = entries.tombstones[mine]
        nothing = np.empty((0, table.dim), np.float32)
        for op, at in ((Op.ASSIGN, mine[~dead]), (Op.DELETE, mine[dead])):
            rows = entries.rows[at] if op is Op.ASSIGN else nothing
            if table.apply(RowBatch(op, entries.keys[at], entries.versions[at], rows)).full.size:
                return False
    return True


def _table(spec: TableSpec) -> CpuTable:
    return CpuTable(dim=spec.dim, capacity_rows=spec.capacity_rows, default_row=spec.default_row)


def _put(table: EmbeddingTable, op: Op, keys: I64, versions: U64, rows: F32) -> bool:
    return table.apply(RowBatch(op, keys, versions, rows)).applied == keys.size
