"""`trirank snapshot` on files: what is listed, what is found wrong, and snapshots for another number of shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from infra.commands.snapshot import app
from infra.errors import ConfigurationError, InvalidInput, TrirankError
from param_server.restore import Part, merged, plan
from param_server.routing import partitions_of_shard
from param_server.snapshot import LogState, Owner, Position, Snapshot, Stored, folder_of, write_snapshot
from param_server.table import Export
from tests.unit.param_server.test_snapshot import damage

N_PARTITIONS = 8
KEYS = np.arange(100, dtype=np.int64)


def owner(n_shards: int, index: int) -> Owner:
    return Owner(7, "abc", index, n_shards, N_PARTITIONS, {"item": 2})


def keep(root: Path, n_shards: int, index: int, *, kind: str = "full", base: Stored | None = None) -> Stored:
    mine = partitions_of_shard(index, N_PARTITIONS, n_shards)
    keys = KEYS[Part(mine, N_PARTITIONS).owns(KEYS)]
    offset = 5 if base is None else 9
    rows = np.full((keys.size, 2), offset, np.float32)
    entries = Export(keys, np.full(keys.size, offset, np.uint64), keys == 3, rows * (keys != 3)[:, None])
    log = LogState("log", {p: Position(offset, 0, 0) for p in mine}, 0, 0)
    snapshot = Snapshot(
        kind, f"{n_shards}-{index}-{offset}", owner(n_shards, index), offset * 1_000_000, log,  # type: ignore[arg-type]
        {"item": [entries]}, base.manifest.id if base else "", base.manifest.log if base else None,
    )  # fmt: skip
    return write_snapshot(folder_of(root, n_shards, index), snapshot)


def trirank_snapshot(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--home", str(home)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "snapshots" / "trirank"


def test_snapshots_are_listed_with_what_they_hold(tmp_path: Path, root: Path) -> None:
    first = keep(root, 1, 0)
    keep(root, 1, 0, kind="delta", base=first)
    rows = json.loads(trirank_snapshot(tmp_path, "list", "--json").stdout)
    assert [(row["snapshot"], row["kind"], row["rows"], row["records"]) for row in rows] == [
        ("of-1/shard-0/snap-000000000001", "full", 100, 40),
        ("of-1/shard-0/snap-000000000002", "delta", 100, 72),
    ]
    assert "snap-000000000002  delta  1970-01-01T00:00:09+00:00" in trirank_snapshot(tmp_path, "list").stdout


def test_sound_snapshots_are_said_to_be_sound(tmp_path: Path, root: Path) -> None:
    keep(root, 1, 0, kind="delta", base=keep(root, 1, 0))
    done = trirank_snapshot(tmp_path, "verify")
    assert done.exit_code == 0
    assert done.stdout.count(": sound") == 2


def test_a_damaged_snapshot_and_what_goes_on_from_it_are_found(tmp_path: Path, root: Path) -> None:
    first = keep(root, 1, 0)
    keep(root, 1, 0, kind="delta", base=first)
    damage(first)
    done = trirank_snapshot(tmp_path, "verify")
    assert isinstance(done.exception, TrirankError)
    assert "sha256 of tables.safetensors differs" in done.stdout
    assert "a gap: its base 1-0-5 is not here, or not sound" in done.stdout


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    assert isinstance(trirank_snapshot(tmp_path, "verify").exception, ConfigurationError)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 8)])
def test_restored_snapshots_hold_every_row_once_for_another_number_of_shards(
    tmp_path: Path, root: Path, before: int, after: int
) -> None:
    for index in range(before):
        keep(root, before, index, kind="delta", base=keep(root, before, index))
    done = trirank_snapshot(tmp_path, "restore", "--shards", str(after))
    assert done.exit_code == 0, done.exception
    assert sorted(folder.name for folder in root.iterdir()) == [f"of-{after}"]
    found: dict[int, tuple[int, bool]] = {}
    for index in range(after):
        mine = partitions_of_shard(index, N_PARTITIONS, after)
        from_disk = plan(root, owner(after, index), mine)
        ((chain, part),) = from_disk.chains
        entries = merged(chain, part)["item"]
        values = zip(entries.versions.tolist(), entries.tombstones.tolist(), strict=True)
        found |= dict(zip(entries.keys.tolist(), values, strict=True))
        assert from_disk.log().positions == {p: Position(9, 0, 0) for p in mine}
    assert found == {key: (9, key == 3) for key in KEYS.tolist()}
    (kept,) = root.parent.glob("trirank.before-*")
    assert (kept / f"of-{before}").is_dir()


def test_a_restore_that_cannot_be_whole_changes_nothing(tmp_path: Path, root: Path) -> None:
    keep(root, 2, 0)
    damage(keep(root, 2, 1))
    before = sorted(root.rglob("*"))
    done = trirank_snapshot(tmp_path, "restore", "--shards", "1")
    assert "no usable snapshot holds partition 4" in str(done.exception)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("shards", ["0", "9"])
def test_an_impossible_number_of_shards_is_refused(tmp_path: Path, root: Path, shards: str) -> None:
    keep(root, 1, 0)
    assert isinstance(trirank_snapshot(tmp_path, "restore", "--shards", shards).exception, InvalidInput)


def test_a_folder_without_snapshots_is_refused(tmp_path: Path) -> None:
    done = trirank_snapshot(tmp_path, "restore", str(tmp_path), "--shards", "1")
    assert isinstance(done.exception, InvalidInput)
