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
from param_server.contract import I64, Op, TableSpec
from param_server.routing import shard_of
from param_server.specs import table_specs
from param_server.table import EmbeddingTable, Export, RowBatch
from param_server.table.device import HOST, TableDevice
from param_server.tiering import Tiers
from param_server.tiers import TieredTable

_PUT_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Generation:
    """Tables by name and by id; `number` and `schema_fingerprint` are the release's. `tiers` are those of the shard."""

    number: int
    release: str
    schema_fingerprint: str
    created_us: int
    tables: Mapping[str, EmbeddingTable]
    by_id: Mapping[int, EmbeddingTable]
    tiers: Tiers | None = None

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


def empty_generation(
    release: Release, place: Place, device: TableDevice = HOST, *, headroom: float, min_capacity_rows: int,
    tiers: Tiers | None = None,
) -> Generation:  # fmt: skip
    """Tables without rows. Raises ReleaseRefused, ConfigurationError."""
    specs = table_specs(release, n_shards=place.n_shards, headroom=headroom, min_capacity_rows=min_capacity_rows)
    tables: Mapping[str, EmbeddingTable] = (
        {name: device.plain(spec) for name, spec in specs.items()} if tiers is None else tiers.tables(specs)
    )
    return generation_of(release, specs, tables, tiers)


def generation_of(
    release: Release, specs: Mapping[str, TableSpec], tables: Mapping[str, EmbeddingTable], tiers: Tiers | None = None
) -> Generation:
    """The tables of a release, one for each spec."""
    manifest = release.manifest
    return Generation(
        number=manifest.generation,
        release=manifest.name,
        schema_fingerprint=manifest.schema_fingerprint,
        created_us=manifest.created_us,
        tables=tables,
        by_id={spec.table_id: tables[name] for name, spec in specs.items()},
        tiers=tiers,
    )


def release_rows(release: Release, name: str, place: Owns) -> Export:
    """The rows of a table of the release that belong to `place`. Raises ReleaseRefused."""
    given = release.table(name)
    if not np.isfinite(given.rows).all():
        raise ReleaseRefused(f"{release.path}: table {name} holds a number that is not finite")
    mine = place.owns(given.keys)
    return Export(given.keys[mine], given.versions[mine], np.zeros(mine.size, np.bool_), given.rows[mine])


def fill_from_release(generation: Generation, release: Release, place: Owns) -> None:
    """Put the rows of the release that belong to `place` into tables without any of them. Raises ReleaseRefused."""
    for name, table in generation.tables.items():
        if not _put(generation, table, release_rows(release, name, place), behind=True):
            raise ReleaseRefused(f"{release.path}: table {name} has more rows here than table_headroom leaves room for")


def fill_from_state(generation: Generation, state: Mapping[str, Export], part: Owns, *, behind: bool = False) -> bool:
    """Put the entries of a snapshot that belong to `part` into tables; False when they do not fit.

    What a table holds already is as new or newer and stays: the snapshots of a chain are given newest first. With
    tiers each key must come once. `behind`: the cold tier may hold newer rows.
    """
    for name, table in generation.tables.items():
        entries = state[name]
        mine = part.owns(entries.keys)
        chosen = Export(entries.keys[mine], entries.versions[mine], entries.tombstones[mine], entries.rows[mine])
        if not _put(generation, table, chosen, behind=behind):
            return False
    return True


def _put(generation: Generation, table: EmbeddingTable, state: Export, *, behind: bool) -> bool:
    if isinstance(table, TieredTable) and generation.tiers is not None:
        return generation.tiers.fill(table, state, behind=behind)
    return put(table, state)


def put(table: EmbeddingTable, state: Export) -> bool:
    """Write entries into a table without tiers, newest wins; False when they do not fit."""
    dead = np.flatnonzero(state.tombstones)
    live = np.flatnonzero(~state.tombstones) if dead.size else slice(None)
    if not _fits(table, RowBatch(Op.ASSIGN, state.keys[live], state.versions[live], state.rows[live])):
        return False
    nothing = np.empty((0, table.dim), np.float32)
    return _fits(table, RowBatch(Op.DELETE, state.keys[dead], state.versions[dead], nothing))


def _fits(table: EmbeddingTable, batch: RowBatch) -> bool:
    # A device takes a batch as a whole: it must not need memory for all rows twice.
    for start in range(0, batch.keys.size, _PUT_AT_ONCE):
        part = slice(start, start + _PUT_AT_ONCE)
        done = table.apply(RowBatch(batch.op, batch.keys[part], batch.versions[part], batch.rows[part]))
        if done.full.size:
            return False
    return True
