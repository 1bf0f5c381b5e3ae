"""Snapshots that belong together: a full one, or a start, and the deltas that go on from each other without a gap.

Reads the folder of one shard. Invariant: a chain that is given out is whole: every base is the snapshot before,
every range of the log begins where the one before ended, every checksum holds. What is wrong is told, and an older
chain used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from param_server.snapshot import (
    LogState,
    Owner,
    SnapshotRefused,
    Stored,
    numbers,
    read_manifest,
    verify_tensors,
)

logger = logging.getLogger(__name__)

# Of a shard's place only the number of partitions counts: rows and positions of a partition move together.
_MUST_AGREE = ("generation", "schema_fingerprint", "n_partitions", "dims")


@dataclass(frozen=True, slots=True)
class Chain:
    """`links` oldest first: a full snapshot or a start, then deltas."""

    links: tuple[Stored, ...]

    @property
    def head(self) -> Stored:
        """The newest of them, whose moment the chain is."""
        return self.links[-1]

    @property
    def log(self) -> LogState:
        """Where the log stood then."""
        return self.head.manifest.log

    @property
    def from_release(self) -> bool:
        """Whether the rows of the release come first."""
        return self.links[0].manifest.kind == "start"


@dataclass(slots=True)
class Shelf:
    """The snapshots of one folder, for tables of `owner`. `refused` says which are not used, and why."""

    folder: Path
    owner: Owner
    refused: dict[str, str] = field(default_factory=dict)
    _stored: dict[str, Stored] = field(default_factory=dict)
    _newest_first: list[Stored] = field(default_factory=list)
    _sound: set[Path] = field(default_factory=set)

    def read(self) -> Shelf:
        """Read every manifest; itself."""
        for number in reversed(numbers(self.folder)):
            folder = self.folder / f"snap-{number:012d}"
            try:
                stored = read_manifest(folder)
                check_owner(stored.manifest.owner, self.owner)
            except SnapshotRefused as error:
                self._refuse(folder, error)
                continue
            self._newest_first.append(stored)
            self._stored.setdefault(stored.manifest.id, stored)
        return self

    def heads(self) -> Iterator[Stored]:
        """Snapshots of the right owner, newest first."""
        yield from self._newest_first

    def chain(self, head: Stored) -> Chain | None:
        """The verified chain that ends in `head`, or None when part of it cannot be used."""
        try:
            links = self._links(head)
            for link in links:
                if link.folder not in self._sound:
                    verify_tensors(link)
                    self._sound.add(link.folder)
        except SnapshotRefused as error:
            self._refuse(head.folder, error)
            return None
        return Chain(links)

    def _links(self, head: Stored) -> tuple[Stored, ...]:
        links = [head]
        while (newer := links[-1]).manifest.kind == "delta":
            base = self._stored.get(newer.manifest.base)
            if base is None:
                raise SnapshotRefused(f"a gap: its base {newer.manifest.base or 'without a name'} is not here")
            check_contiguous(base, newer)
            links.append(base)
        return tuple(reversed(links))

    def _refuse(self, folder: Path, error: SnapshotRefused) -> None:
        if folder.name not in self.refused:
            self.refused[folder.name] = str(error)
            logger.warning("a snapshot is not used", extra={"folder": folder, "reason": error})


def check_owner(theirs: Owner, ours: Owner) -> None:
    """Raise SnapshotRefused that names the first difference that matters."""
    for name in _MUST_AGREE:
        if getattr(theirs, name) != getattr(ours, name):
            raise SnapshotRefused(f"its {name} is {getattr(theirs, name)}, this shard has {getattr(ours, name)}")


def check_contiguous(base: Stored, delta: Stored) -> None:
    """Raise SnapshotRefused unless the delta begins exactly where its base ends."""
    ends, begins = base.manifest.log, delta.manifest.base_log
    if base.number >= delta.number or base.manifest.owner != delta.manifest.owner:
        raise SnapshotRefused(f"a wrong base: {base.folder.name} is no older snapshot of the same shard")
    if begins is None or begins.identity != ends.identity or begins.positions.keys() != ends.positions.keys():
        raise SnapshotRefused(f"a wrong base: {base.folder.name} is of another log")
    for partition, end in ends.positions.items():
        begin = begins.positions[partition]
        if (begin.log_epoch, begin.offset) > (end.log_epoch, end.offset):
            raise SnapshotRefused(
                f"a gap: partition {partition} ends at {end.offset} in {base.folder.name}, "
                f"this begins at {begin.offset}"
            )
        if (begin.log_epoch, begin.offset) < (end.log_epoch, end.offset):
            raise SnapshotRefused(
                f"a duplicate: partition {partition} ends at {end.offset} in {base.folder.name}, "
                f"this begins at {begin.offset}"
            )


def prune(folder: Path, keep_full: int) -> list[str]:
    """Drop what is older than the last `keep_full` full snapshots; the names dropped."""
    stored: list[tuple[int, str]] = []
    for number in numbers(folder):
        try:
            stored.append((number, read_manifest(folder / f"snap-{number:012d}").manifest.kind))
        except SnapshotRefused:
            # Of no use to anybody; it goes with its age.
            stored.append((number, ""))
    fulls = [number for number, kind in stored if kind == "full"]
    if len(fulls) < keep_full:
        return []
    dropped = [f"snap-{number:012d}" for number, _ in stored if number < fulls[-keep_full]]
    for name in dropped:
        # Out of sight in one step: whoever is killed here leaves no half of a snapshot.
        gone = (folder / name).rename(folder / f".{name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
    return dropped
