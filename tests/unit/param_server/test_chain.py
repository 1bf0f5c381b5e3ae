"""Deltas count only as an unbroken chain; an older one is used, and told of, when a newer is broken."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import msgspec
import pytest

from param_server.chain import Chain, Shelf, prune
from param_server.snapshot import LogState, Position, Snapshot, Stored, write_snapshot
from tests.unit.param_server.support import newest_chain
from tests.unit.param_server.test_snapshot import OWNER, a_snapshot, damage


def log_at(offset: int, identity: str = "log") -> LogState:
    return LogState(identity, {0: Position(offset, 0, 0), 1: Position(0, 0, 0)}, 0, 0)


def full(folder: Path, offset: int) -> Stored:
    return write_snapshot(folder, a_snapshot(taken_us=offset, id=f"at{offset}", log=log_at(offset)))


def delta(folder: Path, base: Stored, offset: int, **changed: object) -> Stored:
    snapshot = a_snapshot(
        taken_us=offset, id=f"at{offset}", log=log_at(offset), kind="delta", base=base.manifest.id,
        base_log=base.manifest.log,
    )  # fmt: skip
    return write_snapshot(folder, Snapshot(**{f: changed.get(f, getattr(snapshot, f)) for f in Snapshot.__slots__}))


def offsets(chain: Chain | None) -> list[int]:
    return [] if chain is None else [link.manifest.log.positions[0].offset for link in chain.links]


def reasons(folder: Path) -> str:
    shelf = Shelf(folder, OWNER).read()
    for head in shelf.heads():
        shelf.chain(head)
    return " ".join(shelf.refused.values())


def test_a_full_snapshot_and_its_deltas_are_one_chain(tmp_path: Path) -> None:
    first = full(tmp_path, 5)
    second = delta(tmp_path, first, 8)
    delta(tmp_path, second, 11)
    assert offsets(newest_chain(tmp_path, OWNER)) == [5, 8, 11]


def test_a_missing_delta_is_a_gap_and_the_chain_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = full(tmp_path, 5)
    second = delta(tmp_path, first, 8)
    delta(tmp_path, second, 11)
    shutil.rmtree(second.folder)
    with caplog.at_level(logging.WARNING):
        assert offsets(newest_chain(tmp_path, OWNER)) == [5]
    assert "a snapshot is not used" in caplog.text
    assert "a gap: its base at8 is not here" in reasons(tmp_path)


@pytest.mark.parametrize(
    ("base_log", "why"),
    [
        (log_at(7), "a gap: partition 0 ends at 5"),
        (log_at(3), "a duplicate: partition 0 ends at 5"),
        (log_at(5, "another"), "a wrong base: snap-000000000001 is of another log"),
        (None, "a wrong base"),
    ],
)
def test_a_range_that_does_not_go_on_from_its_base_is_refused(
    tmp_path: Path, base_log: LogState | None, why: str
) -> None:
    delta(tmp_path, full(tmp_path, 5), 8, base_log=base_log)
    assert offsets(newest_chain(tmp_path, OWNER)) == [5]
    assert why in reasons(tmp_path)


def test_a_base_of_another_shard_is_refused(tmp_path: Path) -> None:
    delta(tmp_path, full(tmp_path, 5), 8, owner=msgspec.structs.replace(OWNER, n_shards=2))
    assert offsets(newest_chain(tmp_path, OWNER)) == [5]
    assert "a wrong base" in reasons(tmp_path)


@pytest.mark.parametrize("file", ["manifest.json", "tables.safetensors"])
@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
@pytest.mark.parametrize(("broken", "left"), [(4, [5, 8]), (2, [5]), (3, [5, 8]), (1, [])])
def test_damage_anywhere_gives_way_to_the_newest_chain_without_it(
    tmp_path: Path, file: str, how: str, broken: int, left: list[int]
) -> None:
    first = full(tmp_path, 5)
    second = delta(tmp_path, first, 8)
    third = delta(tmp_path, second, 11)
    fourth = delta(tmp_path, third, 12)
    damage([first, second, third, fourth][broken - 1], file, how)
    assert offsets(newest_chain(tmp_path, OWNER)) == (left if broken != 4 else [5, 8, 11])


def test_a_damaged_full_snapshot_gives_way_to_the_chain_of_the_full_one_before(tmp_path: Path) -> None:
    delta(tmp_path, full(tmp_path, 5), 8)
    newest = full(tmp_path, 11)
    delta(tmp_path, newest, 14)
    damage(newest)
    assert offsets(newest_chain(tmp_path, OWNER)) == [5, 8]


@pytest.mark.parametrize(
    ("field", "value"), [("generation", 8), ("schema_fingerprint", "def"), ("n_partitions", 4), ("dims", {"item": 3})]
)
def test_a_snapshot_of_somebody_else_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    full(tmp_path, 5)
    shelf = Shelf(tmp_path, msgspec.structs.replace(OWNER, **{field: value})).read()
    assert list(shelf.heads()) == []
    assert field in shelf.refused["snap-000000000001"]


def test_the_last_full_snapshots_are_kept_with_what_goes_on_from_them(tmp_path: Path) -> None:
    names = []
    for offset in (5, 11, 17):
        first = full(tmp_path, offset)
        names += [first.folder.name, delta(tmp_path, first, offset + 1).folder.name]
    assert prune(tmp_path, 2) == names[:2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names[2:]
    assert prune(tmp_path, 2) == []
