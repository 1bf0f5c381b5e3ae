"""Snapshots of one shard: rows, versions, tombstones and log positions of one moment, written atomically.

    <directory>/snap-000000000007/manifest.json        whose it is, positions, counts, sha256 of the tensors
                                  tables.safetensors   <table>/keys, /rows, /versions, /tombstones

Written as a draft, synced, then renamed: a snapshot exists whole or not at all. The newest valid one is loaded; one
that is damaged or of another generation, schema or sharding is passed over with the reason in the log, never repaired.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from infra.errors import Permanent
from param_server.table import Export
from param_server.updates import Progress

logger = logging.getLogger(__name__)

FORMAT = 1
KEEP = 2
_MANIFEST = "manifest.json"
_TENSORS = "tables.safetensors"
_NAME = re.compile(r"snap-(\d{12})")


class SnapshotRefused(Permanent):
    """A snapshot that is damaged or belongs to somebody else."""


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose tables these are; a snapshot is loaded only by its equal."""

    generation: int
    schema_fingerprint: str
    index: int
    n_shards: int
    n_partitions: int
    dims: dict[str, int]


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`updates.Progress` of one partition at that moment."""

    offset: int
    log_epoch: int
    event_time_us: int


class LogState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which log the positions belong to, and how often records were lost before they could be applied."""

    identity: str
    positions: dict[int, Position]
    losses: int
    truncations: int

    @classmethod
    def from_the_beginning(cls, partitions: Iterable[int]) -> LogState:
        """Nothing is read yet, of a log not yet seen."""
        return cls("", {p: Position(0, 0, 0) for p in partitions}, 0, 0)

    def progress(self) -> dict[int, Progress]:
        """The positions, to be moved on."""
        return {p: Progress(at.offset, at.log_epoch, at.event_time_us) for p, at in self.positions.items()}


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    owner: Owner
    taken_us: int
    log: LogState
    rows: dict[str, int]
    sha256: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a shard."""

    owner: Owner
    taken_us: int
    log: LogState
    tables: Mapping[str, Export]


def write_snapshot(directory: Path, snapshot: Snapshot) -> Path:
    """Write the snapshot after all others there, drop all but the last two, return its folder. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".snap-*.draft"):
        shutil.rmtree(leftover, ignore_errors=True)
    numbers = _numbers(directory)
    final = directory / f"snap-{(numbers[-1] + 1 if numbers else 1):012d}"
    draft = directory / f".{final.name}.{os.getpid()}.draft"
    draft.mkdir()
    save_file(_tensors(snapshot.tables), draft / _TENSORS)
    manifest = _Manifest(
        FORMAT,
        snapshot.owner,
        snapshot.taken_us,
        snapshot.log,
        {name: table.keys.size for name, table in snapshot.tables.items()},
        _sha256(draft / _TENSORS),
    )
    (draft / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    for file in (draft / _TENSORS, draft / _MANIFEST, draft):
        _sync(file)
    draft.rename(final)
    _sync(directory)
    for number in numbers[: 1 - KEEP]:
        shutil.rmtree(directory / f"snap-{number:012d}", ignore_errors=True)
    return final


def load_newest(directory: Path, owner: Owner) -> Snapshot | None:
    """Return the newest snapshot that is whole and belongs to `owner`; None when there is none."""
    for number in reversed(_numbers(directory)):
        folder = directory / f"snap-{number:012d}"
        try:
            return read_snapshot(folder, owner)
        except SnapshotRefused as error:
            logger.warning("a snapshot is not used", extra={"folder": folder, "reason": error})
    return None


def read_snapshot(folder: Path, owner: Owner) -> Snapshot:
    """Read one snapshot. Raises SnapshotRefused with the reason."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=_Manifest)
        digest = _sha256(folder / _TENSORS)
    except (OSError, msgspec.DecodeError) as error:
        raise SnapshotRefused(f"it is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise SnapshotRefused(f"it has format {manifest.format}, this version reads {FORMAT}")
    for field in Owner.__struct_fields__:
        theirs, ours = getattr(manifest.owner, field), getattr(owner, field)
        if theirs != ours:
            raise SnapshotRefused(f"its {field} is {theirs}, this shard has {ours}")
    if digest != manifest.sha256:
        raise SnapshotRefused(f"it is damaged: the sha256 of {_TENSORS} differs")
    try:
        tensors = load_file(folder / _TENSORS)
        tables = {
            name: Export(
                tensors[f"{name}/keys"],
                tensors[f"{name}/versions"],
                tensors[f"{name}/tombstones"],
                tensors[f"{name}/rows"],
            )
            for name in manifest.rows
        }
    except (KeyError, SafetensorError) as error:
        raise SnapshotRefused(f"it is damaged: {error}") from error
    return Snapshot(manifest.owner, manifest.taken_us, manifest.log, tables)


def _numbers(directory: Path) -> list[int]:
    found = (_NAME.fullmatch(entry.name) for entry in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def _tensors(tables: Mapping[str, Export]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    return {
        f"{name}/{part}": tensor
        for name, table in tables.items()
        for part, tensor in (
            ("keys", table.keys),
            ("versions", table.versions),
            ("tombstones", table.tombstones),
            ("rows", table.rows),
        )
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
