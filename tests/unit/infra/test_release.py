"""A release is whole and sound, or refused with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from infra.errors import ReleaseRefused
from infra.release import (
    CATALOGUE,
    EDGE_MODEL,
    MANIFEST,
    Precision,
    Release,
    Role,
    TableRows,
    read_release,
    write_release,
)


def _write(
    path: Path,
    name: str = "one",
    *,
    models: Mapping[Role, Mapping[Precision, Path]] | None = None,
    scales: Mapping[Role, Path] | None = None,
) -> Release:
    rows = TableRows(
        np.array([-5, 0, 2**62], np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.ones(3, np.uint64),
        np.full(4, 0.5, np.float32),
    )
    model = path.parent / "model.onnx"
    model.write_bytes(b"any bytes")
    return write_release(
        path,
        name=name,
        parent=None,
        created_us=123,
        schema={"n_user_buckets": 8},
        schema_fingerprint="f",
        tables={"item": (4, rows)},
        models=models or {"edge": {"fp32": model}, "rerank": {"fp32": model}},
        scales=scales,
        catalogue=[],
        users=[],
        requests=[],
        report={"a": 1},
        made_with={"torch": "x"},
    )


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return _write(tmp_path / "one")


def _edit(release: Release, change: Callable[[dict], object]) -> None:
    manifest = json.loads((release.path / MANIFEST).read_text())
    change(manifest)
    (release.path / MANIFEST).write_text(json.dumps(manifest))


def test_what_was_written_is_read_back(release: Release) -> None:
    again = read_release(release.path)
    assert again.manifest == release.manifest
    assert again.manifest.report == {"a": 1}
    table = again.table("item")
    assert table.keys.tolist() == [-5, 0, 2**62]
    assert table.rows.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert table.default_row.tolist() == [0.5] * 4
    assert [(t.name, t.table_id, t.dim, t.rows) for t in again.manifest.tables] == [("item", 4, 4, 3)]
    assert again.catalogue() == again.users() == again.requests() == []


def test_the_same_content_under_another_name_is_another_generation(release: Release, tmp_path: Path) -> None:
    assert 0 < release.manifest.generation < 2**32
    other = _write(tmp_path / "two", name="two")
    assert other.manifest.generation != release.manifest.generation
    assert other.manifest.tables[0].fingerprint == release.manifest.tables[0].fingerprint


def test_a_release_is_never_overwritten_and_no_draft_stays_behind(release: Release) -> None:
    with pytest.raises(ReleaseRefused, match="exists already"):
        _write(release.path)
    assert not list(release.path.parent.glob(".*"))


def test_a_flipped_byte_is_found_and_named(release: Release) -> None:
    damaged = release.path / "tables/item.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ReleaseRefused, match=r"tables/item.safetensors is damaged"):
        read_release(release.path)


@pytest.mark.parametrize("name", [EDGE_MODEL, CATALOGUE, "tables/item.safetensors"])
def test_a_missing_file_is_named(release: Release, name: str) -> None:
    (release.path / name).unlink()
    with pytest.raises(ReleaseRefused, match=f"{name} is missing"):
        read_release(release.path)


def test_a_folder_without_a_manifest_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="is no release directory"):
        read_release(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(format=2), "format 2, this version reads 1"),
        (lambda m: m.pop("generation"), "missing required field `generation`"),
        (lambda m: m.update(mood="good"), "unknown field `mood`"),
        (lambda m: m["files"].pop(EDGE_MODEL), "lists no checksum for edge/mlp.fp32.onnx"),
        (lambda m: m["files"].pop("tables/item.safetensors"), "lists no checksum for tables/item.safetensors"),
        (lambda m: m["models"].pop("edge"), r"models of \['rerank'\], there must be those of \['edge', 'rerank'\]"),
        (lambda m: m["models"]["edge"].update(fp8="edge/mlp.fp8.onnx"), "edge has 'fp8' in 'edge/mlp.fp8.onnx'"),
        (lambda m: m["models"]["edge"].update(fp16="/etc/passwd"), "edge has 'fp16' in '/etc/passwd'"),
        (lambda m: m["models"]["edge"].update(int8="edge/mlp.int8.onnx"), "no checksum for edge/mlp.int8.onnx"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    release: Release, change: Callable[[dict], object], reason: str
) -> None:
    _edit(release, change)
    with pytest.raises(ReleaseRefused, match=reason):
        read_release(release.path)


def test_a_manifest_that_is_no_json_is_refused(release: Release) -> None:
    (release.path / MANIFEST).write_text("{")
    with pytest.raises(ReleaseRefused, match=MANIFEST):
        read_release(release.path)


def test_every_precision_and_its_scales_are_read_back(tmp_path: Path) -> None:
    files = {}
    for precision in ("fp32", "fp16", "int8", "int8-cpu", "scales"):
        files[precision] = tmp_path / precision
        files[precision].write_text(precision)
    scales = files.pop("scales")
    written = _write(
        tmp_path / "all", models={"edge": files, "rerank": {"fp32": files["fp32"]}}, scales={"edge": scales}
    )
    again = read_release(written.path)
    assert {p: again.model("edge", p).read_text() for p in files} == {p: p for p in files}
    assert again.model("edge", "int8-cpu") == written.path / "edge/mlp.int8-cpu.onnx"
    assert again.scales("edge").read_text() == "scales"
    assert again.model("rerank", "int8") is None
    assert again.scales("rerank") is None
    again.model("edge", "int8").write_text("other")
    with pytest.raises(ReleaseRefused, match=r"edge/mlp.int8.onnx is damaged"):
        read_release(written.path)


def test_a_release_without_an_fp32_model_is_not_written(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.write_text("m")
    with pytest.raises(ReleaseRefused, match="no FP32 model of rerank"):
        _write(tmp_path / "none", models={"edge": {"fp32": model}, "rerank": {"fp16": model}})
    assert not (tmp_path / "none").exists()


def test_a_release_of_fp32_alone_reads_and_lacks_the_rest(release: Release) -> None:
    assert release.model("edge") == release.edge_model
    assert release.model("rerank", "fp16") is None


def test_every_file_of_a_release_is_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        written = _write(tmp_path / "read")
    finally:
        os.umask(before)
    modes = {f.name: f.stat().st_mode & 0o777 for f in written.path.rglob("*") if f.is_file()}
    assert set(modes.values()) == {0o644}, modes
