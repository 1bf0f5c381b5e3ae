"""The release directory: written once, verified before use, never changed.

    manifest.json                 name, generation, schema, tables, models, report, sha256 of every other file
    tables/<table>.safetensors    keys i64[n], rows f32[n, dim], versions u64[n], default_row f32[dim]
    edge/mlp.<precision>.onnx     rerank/bst.<precision>.onnx; fp32 always, others where they passed the quality gate
    edge/mlp.scales.json          rerank/bst.scales.json; the scales of the INT8 graphs, where there are any
    catalogue.msgpack             what is known of each item, most popular first
    users.msgpack                 attributes and histories at the end of the training period
    requests.msgpack              recorded requests with the scores the trained models gave them

A directory that is incomplete, damaged or made with another schema is refused with the reason; nothing is repaired.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from infra.errors import ReleaseRefused

FORMAT = 1
MANIFEST = "manifest.json"
Role = Literal["edge", "rerank"]
# int8: INT8 over FP16, for GPUs; int8-cpu: INT8 over FP32, for ONNX Runtime.
Precision = Literal["fp32", "fp16", "int8", "int8-cpu"]
ROLES: tuple[Role, ...] = get_args(Role)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_STEM: dict[Role, str] = {"edge": "edge/mlp", "rerank": "rerank/bst"}
CATALOGUE = "catalogue.msgpack"
USERS = "users.msgpack"
REQUESTS = "requests.msgpack"


def model_file(role: Role, precision: Precision) -> str:
    """Where a release keeps this model."""
    return f"{_STEM[role]}.{precision}.onnx"


def scales_file(role: Role) -> str:
    """Where a release keeps the scales of this model's INT8 graphs."""
    return f"{_STEM[role]}.scales.json"


EDGE_MODEL = model_file("edge", "fp32")
RERANK_MODEL = model_file("rerank", "fp32")
# msgpack's mark of an array whose length follows in four bytes.
_ARRAY32 = b"\xdd"
_FIXED = (EDGE_MODEL, RERANK_MODEL, CATALOGUE, USERS, REQUESTS)


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table as the manifest lists it; `fingerprint` is the sha256 of its file."""

    name: str
    table_id: int
    dim: int
    dtype: str
    rows: int
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a release says of itself."""

    format: int
    name: str
    parent: str | None
    created_us: int
    generation: int
    schema: dict[str, Any]
    schema_fingerprint: str
    tables: list[TableEntry]
    models: dict[str, dict[str, str]]
    report: dict[str, Any]
    made_with: dict[str, Any]
    files: dict[str, str]


class Item(msgspec.Struct, frozen=True):
    """One item of the catalogue; `events` is how often it occurs in the training period."""

    item_id: str
    key: int
    title: str
    categories: list[str]
    events: int


class User(msgspec.Struct, frozen=True):
    """One user at the end of the training period; the history is oldest first."""

    user_id: str
    attributes: dict[str, str]
    history_items: list[str]
    history_ts_us: list[int]


class RecordedRequest(msgspec.Struct, frozen=True):
    """One test request and the logits the trained models gave its candidates; `taken` is the candidate that was taken,
    empty in releases that did not record it."""

    user_id: str
    attributes: dict[str, str]
    history_items: list[str]
    history_ts_us: list[int]
    candidates: list[str]
    edge_logits: list[float]
    rerank_logits: list[float]
    taken: str = ""


@dataclass(frozen=True, slots=True)
class TableRows:
    """keys i64[n], rows f32[n, dim], versions u64[n], default_row f32[dim]."""

    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]
    default_row: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Release:
    """A verified release directory."""

    path: Path
    manifest: Manifest

    @property
    def edge_model(self) -> Path:
        """ONNX file of the edge MLP in FP32."""
        return self.path / EDGE_MODEL

    @property
    def rerank_model(self) -> Path:
        """ONNX file of the reranker in FP32."""
        return self.path / RERANK_MODEL

    def model(self, role: Role, precision: Precision = "fp32") -> Path | None:
        """ONNX file of a model; None when the release has none of this precision: it failed the quality gate
        (`manifest.report["precisions"]` says why) or the release was made before there were any."""
        name = self.manifest.models[role].get(precision)
        return None if name is None else self.path / name

    def sound_model(self, role: Role, precision: Precision = "fp32") -> Path | None:
        """The same, looked at again: a file may be damaged long after the release was read. Raises ReleaseRefused."""
        path = self.model(role, precision)
        if path is not None and path.is_file():
            _check_digest(self.path, str(path.relative_to(self.path)), self.manifest.files)
        return path

    def scales(self, role: Role) -> Path | None:
        """The scales of this model's INT8 graphs."""
        name = scales_file(role)
        return self.path / name if name in self.manifest.files else None

    def table(self, name: str) -> TableRows:
        """Rows of one table."""
        tensors = load_file(self.path / f"tables/{name}.safetensors")
        return TableRows(tensors["keys"], tensors["rows"], tensors["versions"], tensors["default_row"])

    def catalogue(self) -> list[Item]:
        """Items, most popular first."""
        return msgspec.msgpack.decode((self.path / CATALOGUE).read_bytes(), type=list[Item])

    def users(self) -> list[User]:
        """Users with their histories."""
        return msgspec.msgpack.decode((self.path / USERS).read_bytes(), type=list[User])

    def requests(self) -> list[RecordedRequest]:
        """Recorded test requests."""
        return msgspec.msgpack.decode((self.path / REQUESTS).read_bytes(), type=list[RecordedRequest])


def write_release(
    path: Path,
    *,
    name: str,
    parent: str | None,
    created_us: int,
    schema: Mapping[str, Any],
    schema_fingerprint: str,
    tables: Mapping[str, tuple[int, TableRows]],
    models: Mapping[Role, Mapping[Precision, Path]],
    scales: Mapping[Role, Path] | None = None,
    catalogue: Iterable[Item],
    users: Iterable[User],
    requests: Iterable[RecordedRequest],
    report: Mapping[str, Any],
    made_with: Mapping[str, Any],
) -> Release:
    """Write a release next to `path`, then move it there in one step. `tables` maps a name to (table_id, rows);
    `models` gives the ONNX files of both rankers, FP32 among them, `scales` those of their INT8 graphs. Raises
    ReleaseRefused when `path` exists already or a ranker has no FP32 model."""
    if path.exists():
        raise ReleaseRefused(f"{path} exists already; a release is never overwritten: choose another name")
    for role in ROLES:
        if "fp32" not in models.get(role, {}):
            raise ReleaseRefused(f"{path}: there is no FP32 model of {role}; a release needs one")
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    for folder in ("tables", "edge", "rerank"):
        (draft / folder).mkdir(parents=True)
    for target, content in ((CATALOGUE, catalogue), (USERS, users), (REQUESTS, requests)):
        _write_list(draft / target, content)
    for table, (_, rows) in tables.items():
        tensors = {"keys": rows.keys, "rows": rows.rows, "versions": rows.versions, "default_row": rows.default_row}
        save_file(tensors, draft / f"tables/{table}.safetensors")
        # safetensors writes for its owner alone; the files of a release are as readable as any other.
        shutil.copymode(draft / CATALOGUE, draft / f"tables/{table}.safetensors")
    for role, by_precision in models.items():
        for precision, file in by_precision.items():
            shutil.copyfile(file, draft / model_file(role, precision))
    for role, file in (scales or {}).items():
        shutil.copyfile(file, draft / scales_file(role))
    files = {str(f.relative_to(draft)): _sha256(f) for f in sorted(draft.rglob("*")) if f.is_file()}
    entries = [
        TableEntry(t, table_id, rows.rows.shape[1], "f32", rows.keys.size, files[f"tables/{t}.safetensors"])
        for t, (table_id, rows) in tables.items()
    ]
    identity = msgspec.json.encode([name, created_us, schema_fingerprint, files], order="sorted")
    manifest = Manifest(
        format=FORMAT,
        name=name,
        parent=parent,
        created_us=created_us,
        generation=int.from_bytes(hashlib.sha256(identity).digest()[:4], "little") or 1,
        schema=dict(schema),
        schema_fingerprint=schema_fingerprint,
        tables=entries,
        models={role: {p: model_file(role, p) for p in PRECISIONS if p in models[role]} for role in ROLES},
        report=dict(report),
        made_with=dict(made_with),
        files=files,
    )
    (draft / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    draft.rename(path)
    return Release(path, manifest)


def _write_list(path: Path, content: Iterable[msgspec.Struct]) -> None:
    """One msgpack array, entry by entry: all users of a large log are more than memory should have to hold."""
    encode, count = msgspec.msgpack.Encoder().encode, 0
    with path.open("wb") as file:
        file.write(_ARRAY32 + bytes(4))
        for entry in content:
            file.write(encode(entry))
            count += 1
        file.seek(1)
        file.write(count.to_bytes(4, "big"))


def read_release(path: Path, *, verify_files: bool = True) -> Release:
    """Read and verify a release. Raises ReleaseRefused with the reason.

    `verify_files=False` trusts the sha256 sums another process of the same stack has just checked.
    """
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise ReleaseRefused(
            f"{path} is no release directory ({MANIFEST}: {error.strerror}); make one with `trirank train`"
        ) from error
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise ReleaseRefused(f"{path}/{MANIFEST}: {error}") from error
    if manifest.format != FORMAT:
        raise ReleaseRefused(f"{path}: format {manifest.format}, this version reads {FORMAT}")
    _check_models(path, manifest)
    models = (name for by_precision in manifest.models.values() for name in by_precision.values())
    wanted = {*_FIXED, *models, *(f"tables/{t.name}.safetensors" for t in manifest.tables)}
    if unlisted := wanted - manifest.files.keys():
        raise ReleaseRefused(f"{path}: the manifest lists no checksum for {sorted(unlisted)[0]}")
    for name in manifest.files if verify_files else ():
        file = path / name
        if not file.is_file():
            raise ReleaseRefused(f"{path}: {name} is missing")
        _check_digest(path, name, manifest.files)
    return Release(path, manifest)


def _check_models(path: Path, manifest: Manifest) -> None:
    """Raises ReleaseRefused unless the models map names files where this version keeps them."""
    if manifest.models.keys() != set(ROLES):
        raise ReleaseRefused(f"{path}: models of {sorted(manifest.models)}, there must be those of {sorted(ROLES)}")
    for role in ROLES:
        known: dict[str, str] = {precision: model_file(role, precision) for precision in PRECISIONS}
        for precision, name in manifest.models[role].items():
            if known.get(precision) != name:
                raise ReleaseRefused(f"{path}: {role} has {precision!r} in {name!r}; this version knows {known}")


def _check_digest(path: Path, name: str, files: Mapping[str, str]) -> None:
    if _sha256(path / name) != files.get(name):
        raise ReleaseRefused(f"{path}: {name} is damaged (its sha256 differs from the manifest's)")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
