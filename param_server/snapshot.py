"""One snapshot of one shard on disk: rows, versions, tombstones and log positions of one moment, written atomically.

    <folder>/snap-000000000007/manifest.json        kind, id, base, whose it is, positions, counts, sha256
                               tables.safetensors   <table>/keys, /rows, /versions, /tombstones

`full` holds everything, `delta` what changed since the snapshot whose id is its `base`, `start` nothing: it says where
in the log a shard began with the rows of its release. Written as a draft, synced, then renamed: a snapshot exists whole
or not at all. One that is damaged or of another format is refused with the reason, never repaired.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from infra.errors import Permanent
from param_server.table import Export
from param_server.updates import Progress

FORMAT = 2
# How keys are spread over partitions (`routing.py`): positions and rows belong together only under the same rule.
ROUTING = "splitmix64-ranges-1"
MANIFEST = "manifest.json"
TENSORS = "tables.safetensors"
_NAME = re.compile(r"snap-(\d{12})")
_PARTS = ("keys", "versions", "tombstones", "rows")
_DTYPES = {"int64": "I64", "uint64": "U64", "bool": "BOOL", "float32": "F32"}

Kind = Literal["full", "delta", "start"]


class SnapshotRefused(Permanent):
    """A snapshot that is damaged, out of its chain, or belongs to somebody else."""


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose tables these are. Rows go only into tables of the same generation, schema, dims and partitions."""

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


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot says of itself. A delta covers the log from `base_log` (its base's `log`) to `log`."""

    format: int
    kind: Kind
    id: str
    base: str
    base_log: LogState | None
    routing: str
    owner: Owner
    taken_us: int
    log: LogState
    rows: dict[str, int]
    sha256: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a shard, its tables in pieces. `base` and `base_log` are those of the snapshot a delta goes on."""

    kind: Kind
    id: str
    owner: Owner
    taken_us: int
    log: LogState
    tables: Mapping[str, Sequence[Export]]
    base: str = ""
    base_log: LogState | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot on disk."""

    folder: Path
    manifest: Manifest
    number: int = field(compare=False, default=0)


def new_id() -> str:
    """A name no other snapshot has."""
    return os.urandom(8).hex()


def folder_of(root: Path, n_shards: int, index: int) -> Path:
    """Where one of `n_shards` shards keeps its snapshots."""
    return root / f"of-{n_shards}" / f"shard-{index}"


def write_snapshot(folder: Path, snapshot: Snapshot) -> Stored:
    """Write the snapshot after all others in the folder. Raises OSError, and leaves nothing behind then."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".snap-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    number = max(numbers(folder), default=0) + 1
    final = folder / f"snap-{number:012d}"
    draft = folder / f".{final.name}.{os.getpid()}.draft"
    draft.mkdir()
    try:
        manifest = _write_files(draft, snapshot)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(folder)
    return Stored(final, manifest, number)


def numbers(folder: Path) -> list[int]:
    """The numbers of the snapshots in a folder, ascending."""
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def read_manifest(folder: Path) -> Stored:
    """Read what a snapshot says of itself. Raises SnapshotRefused."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise SnapshotRefused(f"it is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise SnapshotRefused(f"it has format {manifest.format}, this version reads {FORMAT}")
    if manifest.routing != ROUTING:
        raise SnapshotRefused(f"its keys are spread by {manifest.routing}, here by {ROUTING}")
    name = _NAME.fullmatch(folder.name)
    return Stored(folder, manifest, int(name[1]) if name else 0)


def verify_tensors(stored: Stored) -> None:
    """Read all bytes and compare their checksum. Raises SnapshotRefused."""
    try:
        with (stored.folder / TENSORS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SnapshotRefused(f"it is damaged: {error}") from error
    if digest != stored.manifest.sha256:
        raise SnapshotRefused(f"it is damaged: the sha256 of {TENSORS} differs")


def read_tables(stored: Stored) -> dict[str, Export]:
    """The entries of each table. Raises SnapshotRefused."""
    try:
        tensors = load_file(stored.folder / TENSORS)
        return {name: Export(*(tensors[f"{name}/{part}"] for part in _PARTS)) for name in stored.manifest.rows}
    except (OSError, KeyError, SafetensorError) as error:
        raise SnapshotRefused(f"it is damaged: {error}") from error


def _write_files(draft: Path, snapshot: Snapshot) -> Manifest:
    digest = _write_tensors(draft / TENSORS, snapshot)
    manifest = Manifest(
        format=FORMAT,
        kind=snapshot.kind,
        id=snapshot.id,
        base=snapshot.base,
        base_log=snapshot.base_log,
        routing=ROUTING,
        owner=snapshot.owner,
        taken_us=snapshot.taken_us,
        log=snapshot.log,
        rows={name: sum(piece.keys.size for piece in pieces) for name, pieces in snapshot.tables.items()},
        sha256=digest,
    )
    (draft / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    for file in (draft / TENSORS, draft / MANIFEST, draft):
        _sync(file)
    return manifest


def _write_tensors(path: Path, snapshot: Snapshot) -> str:
    """Write the safetensors file piece by piece, so that no table is copied whole again; its sha256."""
    entries: dict[str, Any] = {}
    at = 0
    for name, pieces in snapshot.tables.items():
        n = sum(piece.keys.size for piece in pieces)
        for part, (dtype, shape) in _layout(n, snapshot.owner.dims[name]).items():
            size = n * np.dtype(dtype).itemsize * (shape[1] if len(shape) > 1 else 1)
            entries[f"{name}/{part}"] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [at, at + size]}
            at += size
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in _blocks(struct.pack("<Q", len(head)) + head, snapshot.tables):
            file.write(block)
            digest.update(block)
    return digest.hexdigest()


def _layout(n: int, dim: int) -> dict[str, tuple[str, list[int]]]:
    return {
        "keys": ("int64", [n]),
        "versions": ("uint64", [n]),
        "rows": ("float32", [n, dim]),
        "tombstones": ("bool", [n]),
    }


def _blocks(head: bytes, tables: Mapping[str, Sequence[Export]]) -> Iterator[bytes | memoryview]:
    yield head
    for pieces in tables.values():
        for part in _layout(0, 0):
            for piece in pieces:
                array = np.ascontiguousarray(getattr(piece, part))
                if array.size:
                    yield array.reshape(-1).view(np.uint8).data


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
