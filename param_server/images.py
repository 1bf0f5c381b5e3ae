"""Tables of a release that shard processes on one host share: each is built once, as an image, and mapped by all.

An image's name is a digest of all that its bytes depend on, so equal tables of two releases are one image whatever
releases they belong to. It is built in a draft that is locked while somebody builds it, written from empty only, and
renamed when it is whole: a process that is killed on the way leaves nothing that would be used. Where there can be no
image the table is filled in memory of this process alone, with a warning and the reason in `private`. Invariant: a file
that somebody may have mapped is never written to and never cut; one that is wrong is replaced by another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from infra.errors import ReleaseRefused
from infra.release import Release, TableEntry
from infra.settings import Settings
from param_server.contract import TableSpec
from param_server.generation import Generation, Place, generation_of, put, release_rows
from param_server.snapshot import ROUTING
from param_server.specs import table_specs
from param_server.table import Export
from param_server.table.cpu import CpuTable
from param_server.table.image import FORMAT, ImageRefused, Shape, Span, build, load

logger = logging.getLogger(__name__)

# A builder that stands still must not keep others from starting.
_WAIT_S = 20.0
_LOOK_EVERY_S = 0.02


def image_folder(settings: Settings) -> Path:
    """Where all shards of a stack, of whatever release, look for images."""
    return settings.run_dir.resolve() / "images" / settings.stack


def image_name(entry: TableEntry, spec: TableSpec, place: Place) -> str:
    """The digest of all that the image of a shard's part of a table depends on."""
    parts = [
        FORMAT, sys.byteorder, ROUTING, entry.fingerprint, spec.default_row.tobytes().hex(), spec.dim,
        spec.capacity_rows, place.index, place.n_shards, place.n_partitions,
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def image_names(
    release: Release, *, n_shards: int, n_partitions: int, headroom: float, min_capacity_rows: int
) -> set[str]:
    """The names of the images of all tables of all shards of a release. Raises ReleaseRefused."""
    specs = table_specs(release, n_shards=n_shards, headroom=headroom, min_capacity_rows=min_capacity_rows)
    places = [Place(index, n_shards, n_partitions) for index in range(n_shards)]
    return {image_name(entry, specs[entry.name], place) for entry in release.manifest.tables for place in places}


@dataclass(frozen=True, slots=True)
class Begun:
    """Tables that hold the rows of their release already, in host memory and without tiers."""

    generation: Generation
    tables: Mapping[str, CpuTable]
    images: Images

    def give_up(self, name: str, reason: str) -> None:
        """All tables are filled in memory of this process alone after all, because of one of them."""
        logger.warning("images are not used", extra={"table": name, "reason": reason})
        self.images.mapped.clear()
        self.images.private.update(dict.fromkeys(self.tables, f"{name}: {reason}"))


class Images:
    """The images in `folder`, for the tables of one shard: `mapped` is where each lies, `private` why others do not."""

    def __init__(self, folder: Path, wait_s: float = _WAIT_S) -> None:
        self._folder = folder
        self._wait_s = wait_s
        self.mapped: dict[str, Span] = {}
        self.private: dict[str, str] = {}

    def begin(self, release: Release, place: Place, *, headroom: float, min_capacity_rows: int) -> Begun:
        """Tables with the rows of the release that belong to `place`. Raises ReleaseRefused."""
        specs = table_specs(release, n_shards=place.n_shards, headroom=headroom, min_capacity_rows=min_capacity_rows)
        tables = {entry.name: self._table(release, entry, specs[entry.name], place)
                  for entry in release.manifest.tables}  # fmt: skip
        return Begun(generation_of(release, specs, tables), tables, self)

    def _table(self, release: Release, entry: TableEntry, spec: TableSpec, place: Place) -> CpuTable:
        @cache
        def rows() -> Export:
            return _verified_rows(release, entry, place)

        def fill(table: CpuTable) -> None:
            if not put(table, rows()):
                raise ReleaseRefused(
                    f"{release.path}: table {entry.name} has more rows here than table_headroom leaves room for"
                )

        shape = Shape(spec.dim, spec.capacity_rows, spec.default_row)
        try:
            name = image_name(entry, spec, place)
            table, self.mapped[entry.name] = self._shared(name, shape, lambda: rows().keys.size, fill)
            self.private.pop(entry.name, None)
            return table
        except (OSError, ImageRefused) as error:
            logger.warning(
                "a table is in memory of this process alone: there is no image of it",
                extra={"table": entry.name, "folder": self._folder, "reason": error},
            )
            self.mapped.pop(entry.name, None)
            self.private[entry.name] = str(error)
        table = CpuTable(dim=spec.dim, capacity_rows=spec.capacity_rows, default_row=spec.default_row)
        fill(table)
        return table

    def _shared(
        self, name: str, shape: Shape, n_rows: Callable[[], int], fill: Callable[[CpuTable], None]
    ) -> tuple[CpuTable, Span]:
        """The table of an image, built if need be. Raises ImageRefused, OSError, ReleaseRefused."""
        _own(self._folder)
        final, draft = self._folder / f"{name}.image", self._folder / f".{name}.draft"
        try:
            return load(final, name, shape)
        except ImageRefused as error:
            if final.exists():
                logger.warning("an image is built again", extra={"image": final, "reason": error})
        file = self._claim(draft)
        made = False
        try:
            try:
                return load(final, name, shape)
            except ImageRefused:
                # Nobody was faster.
                build(file, name, shape, n_rows(), fill)
            os.fchmod(file, 0o400)
            draft.rename(final)
            made = True
        finally:
            if not made:
                draft.unlink(missing_ok=True)
            os.close(file)
        threading.Thread(target=_write_out, args=(final,), name="image-writer", daemon=True).start()
        return load(final, name, shape)

    def _claim(self, draft: Path) -> int:
        """An empty draft that is ours, as an open file. Raises ImageRefused when somebody has it for too long."""
        end_s = time.monotonic() + self._wait_s
        while (file := claimed(draft)) is None:
            if time.monotonic() > end_s:
                raise ImageRefused(f"another process has been building it for {self._wait_s:g} s")
            time.sleep(_LOOK_EVERY_S)
        return file


def claimed(draft: Path) -> int | None:
    """Open and lock an empty draft; None when somebody is building it, or when it had to be thrown away first.

    The lock ends with the process that holds it, however that ends. Raises OSError.
    """
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    ours = False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = os.fstat(file)
        if os.path.samestat(os.stat(draft), about):
            ours = about.st_size == 0
            if not ours:
                # Left by a process that was killed.
                draft.unlink()
    except (BlockingIOError, FileNotFoundError):
        # Somebody has it; or has just made it whole, or thrown it away.
        pass
    finally:
        if not ours:
            os.close(file)
    return file if ours else None


def drop_images(folder: Path, kept: Iterable[str]) -> list[str]:
    """Remove images of other names, and drafts that nobody is building; the names removed. Who maps one keeps it."""
    wanted = set(kept)
    dropped = []
    try:
        for path in folder.glob("*.image"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)
                dropped.append(path.stem)
                logger.info("an image that no served release uses is removed", extra={"image": path})
        for draft in folder.glob(".*.draft"):
            if (file := claimed(draft)) is not None:
                draft.unlink(missing_ok=True)
                os.close(file)
    except OSError as error:
        logger.warning("images that no served release uses are left", extra={"folder": folder, "reason": error})
    return sorted(dropped)


def _own(folder: Path) -> None:
    """Raise ImageRefused unless only this user can put files into the folder, which is made if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise ImageRefused(f"others than this user can write to {folder}")


def _verified_rows(release: Release, entry: TableEntry, place: Place) -> Export:
    """Rows for an image that other releases may use too: the file must be what the manifest says, now."""
    path = release.path / f"tables/{entry.name}.safetensors"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.fingerprint:
            raise ReleaseRefused(f"{release.path}: the sha256 of table {entry.name} is not the manifest's")
    return release_rows(release, entry.name, place)


def _write_out(final: Path) -> None:
    """Have the disk hold what memory holds. It is not waited for: an image that is not whole has another checksum."""
    try:
        file = os.open(final, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        final.unlink(missing_ok=True)
        logger.error("an image could not be written and is removed", extra={"image": final, "reason": error})
