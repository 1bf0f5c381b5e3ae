"""A snapshot comes back exactly, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from param_server import snapshot as module
from param_server.generation import Generation, fill_from_state
from param_server.restore import Part
from param_server.snapshot import (
    LogState,
    Owner,
    Position,
    Snapshot,
    SnapshotRefused,
    Stored,
    read_manifest,
    read_tables,
    verify_tensors,
    write_snapshot,
)
from param_server.table import Export, RowBatch
from tests.unit.param_server.support import N_PARTITIONS, Op, a_table, newest_chain, value_of

OWNER = Owner(7, "abc", 0, 1, N_PARTITIONS, {"item": 2})
LOG = LogState("cluster/topic", {0: Position(5, 1, 1000), 1: Position(0, 0, 0)}, 1, 0)
EVERYWHERE = Part((0, 1), N_PARTITIONS)


def a_state(value: float = 1.0) -> Export:
    table = a_table()
    keys = np.array([-(2**63), 0, 2**63 - 1])
    table.apply(RowBatch(Op.ASSIGN, keys, np.array([1, 2, 2**64 - 1], np.uint64), np.full((3, 2), value, np.float32)))
    table.apply(RowBatch(Op.DELETE, np.array([0]), np.array([9], np.uint64), np.empty((0, 2), np.float32)))
    return table.export()


def a_snapshot(value: float = 1.0, taken_us: int = 123, **changed: Any) -> Snapshot:
    given = {"kind": "full", "id": f"id{taken_us}", "owner": OWNER, "taken_us": taken_us, "log": LOG}
    return Snapshot(**{**given, "tables": {"item": [a_state(value)]}, **changed})


def test_a_snapshot_comes_back_with_tombstones_and_positions(tmp_path: Path) -> None:
    write_snapshot(tmp_path, a_snapshot())
    chain = newest_chain(tmp_path, OWNER)
    assert chain is not None
    got = chain.head.manifest
    assert (got.owner, got.taken_us, got.log, got.rows) == (OWNER, 123, LOG, {"item": 3})
    table = a_table()
    generation = Generation(7, "r", "abc", 0, {"item": table}, {4: table})
    assert fill_from_state(generation, read_tables(chain.head), EVERYWHERE)
    assert (table.size, table.tombstones) == (2, 1)
    assert (value_of(table, -(2**63)), value_of(table, 0), value_of(table, 2**63 - 1)) == (1.0, None, 1.0)
    again = table.export()
    assert dict(zip(again.keys.tolist(), again.versions.tolist(), strict=True)) == {
        -(2**63): 1, 0: 9, 2**63 - 1: 2**64 - 1,
    }  # fmt: skip


def test_pieces_come_back_joined_in_order(tmp_path: Path) -> None:
    one, two = a_state(1.0), a_state(2.0)
    got = read_tables(write_snapshot(tmp_path, a_snapshot(tables={"item": [one, two]})))["item"]
    assert got.keys.tolist() == [*one.keys.tolist(), *two.keys.tolist()]
    assert got.rows.tolist() == [*one.rows.tolist(), *two.rows.tolist()]


def test_empty_tables_can_be_kept(tmp_path: Path) -> None:
    stored = write_snapshot(tmp_path, a_snapshot(tables={"item": []}))
    verify_tensors(stored)
    assert read_tables(stored)["item"].rows.shape == (0, 2)


def test_a_table_that_has_become_too_small_is_not_filled() -> None:
    small = a_table(capacity_rows=2)
    generation = Generation(7, "r", "abc", 0, {"item": small}, {4: small})
    assert not fill_from_state(generation, {"item": a_state()}, EVERYWHERE)


def test_what_a_table_holds_already_stays_when_an_older_snapshot_follows() -> None:
    table = a_table()
    generation = Generation(7, "r", "abc", 0, {"item": table}, {4: table})
    for value in (2.0, 1.0):
        assert fill_from_state(generation, {"item": a_state(value)}, EVERYWHERE)
    assert value_of(table, -(2**63)) == 2.0


def test_a_draft_left_by_a_crash_is_ignored_and_cleared(tmp_path: Path) -> None:
    draft = tmp_path / ".snap-000000000001.99999.draft"
    draft.mkdir()
    gone = tmp_path / ".snap-000000000000.gone"
    gone.mkdir()
    (draft / "tables.safetensors").write_bytes(b"half")
    assert newest_chain(tmp_path, OWNER) is None
    write_snapshot(tmp_path, a_snapshot())
    assert not draft.exists()
    assert not gone.exists()


@pytest.mark.parametrize("file", ["manifest.json", "tables.safetensors"])
@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_a_damaged_snapshot_is_refused_with_the_reason(tmp_path: Path, file: str, how: str) -> None:
    stored = write_snapshot(tmp_path, a_snapshot())
    damage(stored, file, how)
    with pytest.raises(SnapshotRefused, match="damaged"):
        verify_tensors(read_manifest(stored.folder))


def damage(stored: Stored, file: str = "tables.safetensors", how: str = "flipped") -> None:
    victim = stored.folder / file
    content = bytearray(victim.read_bytes())
    if how == "missing":
        victim.unlink()
        return
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content[: len(content) // 2] if how == "cut" else content)


@pytest.mark.parametrize(("field", "value"), [("format", 1), ("routing", "crc32")])
def test_a_snapshot_of_another_format_or_routing_is_refused(tmp_path: Path, field: str, value: object) -> None:
    stored = write_snapshot(tmp_path, a_snapshot())
    changed = msgspec.structs.replace(stored.manifest, **{field: value})
    (stored.folder / "manifest.json").write_bytes(msgspec.json.encode(changed))
    with pytest.raises(SnapshotRefused, match=str(value)):
        read_manifest(stored.folder)


def test_a_disk_that_fills_up_leaves_what_was_there_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(tmp_path, a_snapshot(taken_us=1))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(tmp_path, a_snapshot(taken_us=2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["snap-000000000001"]


def test_no_folder_is_no_snapshot(tmp_path: Path) -> None:
    assert newest_chain(tmp_path / "nowhere", OWNER) is None
