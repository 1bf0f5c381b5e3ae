"""The engines built from a release: files beside it, and `engines.json` that says what each was built from.

    <release>.engines/<role>-<precision>-<target>.<ext>     one engine
    <release>.engines/engines.json                          what it was built from, by what, for which machine
    <release>.engines/timing.<builder>-<version>-sm<nn>     what a builder measured, reused by the next build

The release is immutable and stays so; an engine is derived from it, fits one machine and can be built again. Refuses,
with the reason, an engine that is absent, damaged, built from another ONNX file (stale), or by another builder version,
for another GPU or under another driver (foreign). Invariant: what `find` returns is what the builder wrote.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from infra.engine.run import EngineDamaged, EngineUnavailable

FORMAT = 1
INDEX = "engines.json"


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine is. `sms`: compute capabilities it runs on (75 is 7.5), none for an engine of the CPU;
    `driver`: the one it was built under, None when no GPU took part; `shapes`: largest batch, history, candidates."""

    file: str
    role: str
    precision: str
    target: str
    builder: str
    builder_version: str
    sms: list[int]
    driver: str | None
    onnx_sha256: str
    sha256: str
    shapes: dict[str, int]


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    engines: list[EngineEntry]


class EngineStore:
    """The engine folder of one release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> list[EngineEntry]:
        """Every engine the folder lists; none when there is no folder. Raises EngineUnavailable when the list itself
        cannot be read."""
        try:
            raw = (self._folder / INDEX).read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EngineUnavailable(f"{self._folder / INDEX}: {error.strerror}") from error
        try:
            index = msgspec.json.decode(raw, type=_Index)
        except msgspec.DecodeError as error:
            raise EngineDamaged(f"{self._folder / INDEX} is damaged ({error}); remove it and build again") from error
        if index.format != FORMAT:
            raise EngineUnavailable(
                f"{self._folder / INDEX}: format {index.format}, this version reads {FORMAT}; remove it and build again"
            )
        return index.engines

    def add(self, entry: EngineEntry, engine: bytes) -> Path:
        """Write an engine in place of the one of its name. A process that dies on the way leaves the old one, or a
        new one that is refused as damaged until it is built again; never one that passes for another."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / entry.file
        entry = msgspec.structs.replace(entry, sha256=hashlib.sha256(engine).hexdigest())
        with self._locked():
            others = [known for known in self.entries() if known.file != entry.file]
            index = _Index(FORMAT, sorted([*others, entry], key=lambda known: known.file))
            write_whole(path, engine)
            write_whole(self._folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
        return path

    def find(
        self, *, role: str, precision: str, builder: str, version: str, sm: int | None, driver: str | None, onnx: Path
    ) -> tuple[EngineEntry, bytes]:
        """The engine of this ONNX file for this machine: its entry and its bytes. `sm` None is the CPU.

        Raises EngineUnavailable: absent, damaged, stale or foreign.
        """
        same = [e for e in self.entries() if (e.role, e.precision, e.builder) == (role, precision, builder)]
        if not same:
            how = "--targets cpu" if sm is None else f"--targets ... --builder {builder}"
            raise EngineUnavailable(
                f"{self._folder} holds no {builder} engine of {role} in {precision}; build one with "
                f"`trirank release build {onnx.parents[1]} {how}`"
            )
        here = sorted((e for e in same if (not e.sms if sm is None else sm in e.sms)), key=lambda e: len(e.sms))
        if not here:
            built = sorted({f"SM{one}" for e in same for one in e.sms}) or ["CPU"]
            raise EngineUnavailable(
                f"{role} in {precision} is built by {builder} for {', '.join(built)}; this machine is "
                f"{'the CPU' if sm is None else f'SM{sm}'}: build for it too"
            )
        wanted = sha256_of(onnx)
        reasons = []
        for entry in here:
            if reason := why_unfit(entry, version=version, driver=driver, onnx_sha256=wanted):
                reasons.append(f"{entry.file} {reason}")
                continue
            return entry, self._read(entry)
        raise EngineUnavailable("; ".join(reasons) + ": build it again")

    def built(self, entry: EngineEntry) -> Path | None:
        """The file of an engine that was built from the same, by the same, for the same, and is whole; else None."""
        for known in self.entries():
            if msgspec.structs.replace(known, sha256="") == msgspec.structs.replace(entry, sha256=""):
                try:
                    self._read(known)
                except EngineUnavailable:
                    return None
                return self._folder / known.file
        return None

    def timing_cache(self, builder: str, version: str, sm: int) -> Path:
        """Where a builder keeps what it has measured on this kind of GPU."""
        return self._folder / f"timing.{builder}-{version}-sm{sm}"

    def _read(self, entry: EngineEntry) -> bytes:
        path = self._folder / entry.file
        if path.parent != self._folder:
            raise EngineUnavailable(f"{INDEX} names {entry.file!r}, which is not in {self._folder}")
        try:
            engine = path.read_bytes()
        except OSError as error:
            raise EngineUnavailable(f"{path}: {error.strerror}; build it again") from error
        if hashlib.sha256(engine).hexdigest() != entry.sha256:
            raise EngineDamaged(f"{path} is damaged (its sha256 differs from {INDEX}'s); build it again")
        return engine

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time: two builds of one release may run side by side."""
        with (self._folder / f".{INDEX}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def why_unfit(entry: EngineEntry, *, version: str, driver: str | None, onnx_sha256: str) -> str:
    """Why an engine for this kind of machine does not serve this ONNX file here; empty when it does."""
    if entry.onnx_sha256 != onnx_sha256:
        return "is stale: it was built from another ONNX file"
    if entry.builder_version != version:
        return f"was built by {entry.builder} {entry.builder_version}, {version} is installed"
    if entry.driver is not None and entry.driver != driver:
        return f"was built under driver {entry.driver}, this machine has {driver or 'none'}"
    return ""


def sha256_of(path: Path) -> str:
    """Of a file. Raises EngineUnavailable when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineUnavailable(f"{path}: {error.strerror}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by one that holds all of `content`, on the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
