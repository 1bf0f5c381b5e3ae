"""Whatever number of shards left snapshots, each partition goes on, rows included, from what reaches furthest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.release import Release
from param_server.generation import Generation, Place, empty_generation
from param_server.restore import Part, Restored, plan, restore
from param_server.routing import partition_of, partitions_of_shard
from param_server.snapshot import LogState, Owner, Position, Snapshot, folder_of, write_snapshot
from param_server.table import Export
from tests.unit.param_server.test_generation import KEYS, a_release

N_PARTITIONS = 8
ALL = np.arange(200, dtype=np.int64)


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return a_release(tmp_path)


def owner(release: Release, n_shards: int, index: int) -> Owner:
    return Owner(release.manifest.generation, "abc", index, n_shards, N_PARTITIONS, {"item": 2})


def keep(
    root: Path, release: Release, n_shards: int, index: int, offset: int, value: float, *, identity: str = "log",
    taken_us: int = 0,
) -> Path:  # fmt: skip
    """A full snapshot of one shard in which every key of its partitions has the value."""
    mine = partitions_of_shard(index, N_PARTITIONS, n_shards)
    keys = ALL[Part(mine, N_PARTITIONS).owns(ALL)]
    rows = np.full((keys.size, 2), value, np.float32)
    entries = Export(keys, np.full(keys.size, offset + 2, np.uint64), np.zeros(keys.size, np.bool_), rows)
    log = LogState(identity, {p: Position(offset, 0, offset) for p in mine}, 0, 0)
    snapshot = Snapshot(
        "full", f"{n_shards}-{index}-{offset}", owner(release, n_shards, index), taken_us or offset, log,
        {"item": [entries]},
    )  # fmt: skip
    return write_snapshot(folder_of(root, n_shards, index), snapshot).folder


def start(root: Path, release: Release, n_shards: int, index: int, headroom: float = 4.0) -> Restored:
    place = Place(index, n_shards, N_PARTITIONS)

    def empty() -> Generation:
        return empty_generation(release, place, headroom=headroom, min_capacity_rows=1)

    mine = partitions_of_shard(index, N_PARTITIONS, n_shards)
    return restore(root, owner(release, n_shards, index), mine, release, empty)


def values(restored: Restored) -> dict[int, float]:
    rows, found = restored.generation.tables["item"].lookup(ALL)
    return {int(k): float(r[0]) for k, r, f in zip(ALL, rows, found, strict=True) if f}


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2), (1, 8), (2, 2)])
def test_shards_of_another_number_hold_every_row_once_and_go_on_at_its_position(
    tmp_path: Path, release: Release, before: int, after: int
) -> None:
    for index in range(before):
        keep(tmp_path, release, before, index, 10 + index, 100.0 + index)
    found: dict[int, float] = {}
    positions: dict[int, int] = {}
    for index in range(after):
        restored = start(tmp_path, release, after, index)
        assert not found.keys() & values(restored).keys()
        found |= values(restored)
        positions |= {p: at.offset for p, at in restored.log.positions.items()}
        assert (restored.goes_on is not None) == (before == after)
    partitions = partition_of(ALL, N_PARTITIONS).tolist()
    assert found == {key: 100.0 + p * before // N_PARTITIONS for key, p in zip(ALL.tolist(), partitions, strict=True)}
    assert positions == {p: 10 + p * before // N_PARTITIONS for p in range(N_PARTITIONS)}


def test_what_reaches_furthest_counts_whoever_wrote_it(tmp_path: Path, release: Release) -> None:
    keep(tmp_path, release, 1, 0, 50, 1.0)
    keep(tmp_path, release, 2, 0, 60, 2.0)
    keep(tmp_path, release, 2, 1, 40, 3.0)
    restored = start(tmp_path, release, 1, 0)
    assert {p: at.offset for p, at in restored.log.positions.items()} == {p: 60 if p < 4 else 50 for p in range(8)}
    assert set(values(restored).values()) == {2.0, 1.0}


def test_a_partition_nobody_kept_comes_from_the_release_and_the_beginning_of_the_log(
    tmp_path: Path, release: Release
) -> None:
    keep(tmp_path, release, 2, 0, 60, 2.0)
    restored = start(tmp_path, release, 1, 0)
    assert {p: at.offset for p, at in restored.log.positions.items()} == {p: 60 if p < 4 else 0 for p in range(8)}
    assert restored.log.identity == "log"
    late = KEYS[partition_of(KEYS, N_PARTITIONS) >= 4].tolist()
    assert {key: v for key, v in values(restored).items() if v == 1.0} == dict.fromkeys(late, 1.0)
    assert restored.source == "of-2/shard-0/snap-000000000001, release"


def test_a_damaged_snapshot_gives_way_and_is_told_of(tmp_path: Path, release: Release) -> None:
    keep(tmp_path, release, 2, 0, 40, 1.0)
    keep(tmp_path, release, 2, 1, 40, 1.0)
    newest = keep(tmp_path, release, 1, 0, 50, 2.0)
    content = bytearray((newest / "tables.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "tables.safetensors").write_bytes(content)
    restored = start(tmp_path, release, 1, 0)
    assert set(values(restored).values()) == {1.0}
    assert "sha256" in restored.refused["of-1/shard-0/snap-000000000001"]


def test_partitions_of_a_log_that_is_gone_begin_anew_and_are_counted(tmp_path: Path, release: Release) -> None:
    keep(tmp_path, release, 2, 0, 60, 2.0, identity="old", taken_us=1)
    keep(tmp_path, release, 2, 1, 5, 3.0, identity="new", taken_us=2)
    log = start(tmp_path, release, 1, 0).log
    assert (log.identity, log.losses) == ("new", 4)
    assert {p: (at.offset, at.log_epoch) for p, at in log.positions.items()} == {
        p: (0, 1) if p < 4 else (5, 0) for p in range(8)
    }


def test_rows_without_room_are_not_half_loaded_and_the_log_is_read_from_its_beginning(
    tmp_path: Path, release: Release
) -> None:
    keep(tmp_path, release, 1, 0, 50, 2.0)
    restored = start(tmp_path, release, 1, 0, headroom=1.0)
    assert values(restored) == dict.fromkeys(KEYS.tolist(), 1.0)
    assert {at.offset for at in restored.log.positions.values()} == {0}
    assert restored.log.identity == "log"
    assert "table_headroom" in " ".join(restored.refused.values())


def test_snapshots_of_another_number_of_partitions_are_of_no_use(tmp_path: Path, release: Release) -> None:
    keep(tmp_path, release, 1, 0, 50, 2.0)
    other = msgspec.structs.replace(owner(release, 1, 0), n_partitions=4)
    found = plan(tmp_path, other, range(4))
    assert (found.chains, found.from_release.partitions) == ((), (0, 1, 2, 3))
    assert "n_partitions" in " ".join(found.refused.values())


def test_a_noted_start_keeps_the_rows_of_the_release_and_its_place_in_the_log(tmp_path: Path, release: Release) -> None:
    log = LogState("log", {p: Position(50, 0, 0) for p in range(8)}, 0, 0)
    write_snapshot(folder_of(tmp_path, 1, 0), Snapshot("start", "s", owner(release, 1, 0), 1, log, {}))
    restored = start(tmp_path, release, 1, 0)
    assert values(restored) == dict.fromkeys(KEYS.tolist(), 1.0)
    assert restored.log == log
    assert restored.goes_on is None
