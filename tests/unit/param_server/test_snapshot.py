"""A snapshot comes back exactly, or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest

from param_server.generation import Generation, fill_from_state
from param_server.snapshot import (
    LogState,
    Owner,
    Position,
    Snapshot,
    SnapshotRefused,
    load_newest,
    read_snapshot,
    write_snapshot,
)
from param_server.table import Export, RowBatch
from tests.unit.param_server.support import Op, a_table, value_of

OWNER = Owner(7, "abc", 0, 1, 8, {"item": 2})
LOG = LogState("cluster/topic", {0: Position(5, 1, 1000), 3: Position(0, 0, 0)}, 1, 0)


def a_state(value: float = 1.0) -> dict[str, Export]:
    table = a_table()
    keys = np.array([-(2**63), 0, 2**63 - 1])
    table.apply(RowBatch(Op.ASSIGN, keys, np.array([1, 2, 2**64 - 1], np.uint64), np.full((3, 2), value, np.float32)))
    table.apply(RowBatch(Op.DELETE, np.array([0]), np.array([9], np.uint64), np.empty((0, 2), np.float32)))
    return {"item": table.export()}


def a_snapshot(value: float = 1.0, taken_us: int = 123) -> Snapshot:
    return Snapshot(OWNER, taken_us, LOG, a_state(value))


def test_a_snapshot_comes_back_with_tombstones_and_positions(tmp_path: Path) -> None:
    write_snapshot(tmp_path, a_snapshot())
    got = load_newest(tmp_path, OWNER)
    assert got is not None
    assert (got.owner, got.taken_us, got.log) == (OWNER, 123, LOG)
    table = a_table()
    generation = Generation(7, "r", "abc", 0, {"item": table}, {4: table})
    assert fill_from_state(generation, got.tables)
    assert (table.size, table.tombstones) == (2, 1)
    assert (value_of(table, -(2**63)), value_of(table, 0), value_of(table, 2**63 - 1)) == (1.0, None, 1.0)
    again = table.export()
    assert dict(zip(again.keys.tolist(), again.versions.tolist(), strict=True)) == {
        -(2**63): 1, 0: 9, 2**63 - 1: 2**64 - 1,
    }  # fmt: skip


def test_empty_tables_can_be_kept(tmp_path: Path) -> None:
    write_snapshot(tmp_path, Snapshot(OWNER, 1, LOG, {"item": a_table().export()}))
    got = load_newest(tmp_path, OWNER)
    assert got is not None
    assert got.tables["item"].rows.shape == (0, 2)


def test_a_table_that_has_become_too_small_is_not_filled(tmp_path: Path) -> None:
    small = a_table(capacity_rows=2)
    assert not fill_from_state(Generation(7, "r", "abc", 0, {"item": small}, {4: small}), a_state())


def test_only_the_last_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for taken_us in range(5):
        write_snapshot(tmp_path, a_snapshot(taken_us=taken_us))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["snap-000000000004", "snap-000000000005"]
    got = load_newest(tmp_path, OWNER)
    assert got is not None
    assert got.taken_us == 4


def test_a_draft_left_by_a_crash_is_ignored_and_cleared(tmp_path: Path) -> None:
    draft = tmp_path / ".snap-000000000001.99999.draft"
    draft.mkdir()
    (draft / "tables.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path, OWNER) is None
    write_snapshot(tmp_path, a_snapshot())
    assert not draft.exists()


@pytest.mark.parametrize("file", ["manifest.json", "tables.safetensors"])
@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_a_damaged_snapshot_gives_way_to_the_one_before(
    tmp_path: Path, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_snapshot(tmp_path, a_snapshot(taken_us=1))
    victim = write_snapshot(tmp_path, a_snapshot(taken_us=2)) / file
    content = bytearray(victim.read_bytes())
    if how == "missing":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 0xFF
        victim.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    with caplog.at_level(logging.WARNING):
        got = load_newest(tmp_path, OWNER)
    assert got is not None
    assert got.taken_us == 1
    assert "a snapshot is not used" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", 8),
        ("schema_fingerprint", "def"),
        ("index", 1),
        ("n_shards", 2),
        ("n_partitions", 4),
        ("dims", {"item": 3}),
    ],
)
def test_a_snapshot_of_somebody_else_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    folder = write_snapshot(tmp_path, a_snapshot())
    with pytest.raises(SnapshotRefused, match=field):
        read_snapshot(folder, msgspec.structs.replace(OWNER, **{field: value}))


def test_a_snapshot_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path, a_snapshot())
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(SnapshotRefused, match="format 2"):
        read_snapshot(folder, OWNER)


def test_no_folder_is_no_snapshot(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", OWNER) is None
