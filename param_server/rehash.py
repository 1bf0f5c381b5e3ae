"""Snapshots of some number of shards written again for another number: files in, files out, nobody serves.

Refuses a source that lacks a partition. Invariant: the target is whole or not there; what was there is kept beside it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from infra.errors import InvalidInput
from param_server.restore import Plan, merged, plan
from param_server.routing import partitions_of_shard
from param_server.snapshot import (
    Owner,
    Snapshot,
    SnapshotRefused,
    Stored,
    folder_of,
    new_id,
    numbers,
    read_manifest,
    write_snapshot,
)
from param_server.table import Export


def newest(root: Path) -> Stored:
    """The snapshot taken last, of any shard. Raises InvalidInput when there is none that can be read."""
    found: list[Stored] = []
    for folder in root.glob("of-*/shard-*"):
        for number in numbers(folder):
            try:
                found.append(read_manifest(folder / f"snap-{number:012d}"))
            except SnapshotRefused:
                continue
    if not found:
        raise InvalidInput(str(root), "holds no snapshot (it should have folders like of-1/shard-0/snap-000000000001)")
    return max(found, key=lambda stored: stored.manifest.taken_us)


def rehash(source: Path, target: Path, n_shards: int, done: Callable[[Stored], None]) -> Path | None:
    """Write for each of `n_shards` shards one full snapshot under `target`; where what was there has gone, or None.

    Raises InvalidInput, SnapshotRefused, OSError; `target` is untouched then.
    """
    model = newest(source).manifest.owner
    if not 1 <= n_shards <= model.n_partitions:
        raise InvalidInput("shards", f"{n_shards} is not between 1 and the {model.n_partitions} partitions")
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for index in range(n_shards):
            owner = msgspec.structs.replace(model, n_shards=n_shards, index=index)
            done(_write_shard(source, draft, owner))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    before = None
    if target.exists():
        before = target.rename(target.with_name(f"{target.name}.before-{time.strftime('%Y%m%dT%H%M%S')}"))
    draft.rename(target)
    return before


def _write_shard(source: Path, draft: Path, owner: Owner) -> Stored:
    mine = partitions_of_shard(owner.index, owner.n_partitions, owner.n_shards)
    found = plan(source, owner, mine)
    _check(source, found)
    pieces: dict[str, list[Export]] = {name: [] for name in owner.dims}
    for chain, part in found.chains:
        for name, entries in merged(chain, part).items():
            pieces[name].append(entries)
    taken_us = max(chain.head.manifest.taken_us for chain, _ in found.chains)
    snapshot = Snapshot("full", new_id(), owner, taken_us, found.log(), pieces)
    return write_snapshot(folder_of(draft, owner.n_shards, owner.index), snapshot)


def _check(source: Path, found: Plan) -> None:
    missing = [*found.from_release.partitions]
    missing += [p for chain, part in found.chains if chain.from_release for p in part.partitions]
    if missing:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.refused.items())
        raise SnapshotRefused(f"{source}: no usable snapshot holds partition {missing[0]}. {why}".rstrip(". "))
