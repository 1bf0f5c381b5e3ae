"""When snapshots are taken, what is in them, and what a failed one leaves behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from param_server.keeper import Keeping, SnapshotKeeper
from param_server.restore import merged
from param_server.table import EmbeddingTable, Export, RowBatch
from param_server.table.cpu import CpuTable
from tests.unit.param_server.support import Op, SteppingClock, a_table, newest_chain
from tests.unit.param_server.test_chain import log_at
from tests.unit.param_server.test_snapshot import EVERYWHERE, OWNER


def put(table: EmbeddingTable, keys: list[int], value: float) -> None:
    n = len(keys)
    versions, rows = np.full(n, int(value), np.uint64), np.full((n, 2), value, np.float32)
    table.apply(RowBatch(Op.ASSIGN, np.array(keys, np.int64), versions, rows))


def a_keeper(folder: Path, clock: SteppingClock | None = None, **keeping: int) -> SnapshotKeeper:
    return SnapshotKeeper(folder, Keeping(30.0, **keeping), clock or SteppingClock())


def keep(keeper: SnapshotKeeper, tables: dict[str, EmbeddingTable], offset: int) -> None:
    keeper.begin(OWNER, log_at(offset), tables)
    while keeper.advance(1.0):
        pass
    keeper.wait()


def kept(folder: Path) -> tuple[list[str], dict[int, float]]:
    """Kinds of the links of the newest chain, and the rows it gives."""
    chain = newest_chain(folder, OWNER)
    assert chain is not None
    entries = merged(chain, EVERYWHERE)["item"]
    rows = dict(zip(entries.keys.tolist(), entries.rows[:, 0].tolist(), strict=True))
    return [link.manifest.kind for link in chain.links], rows


def test_a_snapshot_is_due_after_the_interval_or_when_somebody_asks(tmp_path: Path) -> None:
    clock = SteppingClock()
    keeper = a_keeper(tmp_path, clock)
    clock.time_s = 29.0
    assert not keeper.due
    assert keeper.ask() == 1
    assert keeper.due
    keep(keeper, {"item": a_table()}, 1)
    assert keeper.health()["answered"] == 1
    assert not keeper.due
    clock.time_s = 59.0
    assert keeper.due
    keeper.begin(OWNER, log_at(2), {"item": a_table()})
    assert not keeper.due


def test_full_snapshots_and_deltas_take_turns_and_give_the_same_rows(tmp_path: Path) -> None:
    table = a_table()
    tables: dict[str, EmbeddingTable] = {"item": table}
    keeper = a_keeper(tmp_path, deltas=2)
    expected = {}
    kinds = []
    for turn in range(1, 6):
        put(table, [turn, 0], float(turn))
        expected |= {turn: float(turn), 0: float(turn)}
        keep(keeper, tables, turn)
        found, rows = kept(tmp_path)
        kinds.append(found)
        assert rows == expected
    assert kinds == [["full"], ["full", "delta"], ["full", "delta", "delta"], ["full"], ["full", "delta"]]


def test_a_full_one_can_be_asked_for(tmp_path: Path) -> None:
    tables: dict[str, EmbeddingTable] = {"item": a_table()}
    keeper = a_keeper(tmp_path)
    keep(keeper, tables, 1)
    keeper.ask(full=True)
    keep(keeper, tables, 2)
    assert kept(tmp_path)[0] == ["full"]


def test_a_snapshot_is_of_the_moment_it_was_begun(tmp_path: Path) -> None:
    table = CpuTable(dim=2, capacity_rows=20_000, default_row=np.zeros(2, np.float32))
    put(table, list(range(10_000)), 1.0)
    keeper = a_keeper(tmp_path, SteppingClock(step_s=0.01))
    keeper.begin(OWNER, log_at(1), {"item": table})
    slices = 1
    while keeper.advance(0.0):
        slices += 1
        put(table, list(range(0, 20_000, 7)), 2.0)
    keeper.wait()
    assert slices > 2
    assert kept(tmp_path)[1] == dict.fromkeys(range(10_000), 1.0)


def test_a_snapshot_that_cannot_be_written_is_told_of_and_the_next_one_makes_it_good(tmp_path: Path) -> None:
    table = a_table()
    tables: dict[str, EmbeddingTable] = {"item": table}
    folder = tmp_path / "snapshots"
    keeper = a_keeper(folder)
    put(table, [1], 1.0)
    keep(keeper, tables, 1)
    aside = folder.rename(tmp_path / "aside")
    folder.write_bytes(b"no folder")
    put(table, [2], 2.0)
    keeper.ask()
    keep(keeper, tables, 2)
    health = keeper.health()
    assert (health["written"], health["failed"], health["answered"], keeper.behind) == (1, 1, 1, True)
    assert "xists" in health["error"] or "ot a directory" in health["error"]
    folder.unlink()
    aside.rename(folder)
    assert kept(folder)[1] == {1: 1.0}
    put(table, [3], 3.0)
    keep(keeper, tables, 3)
    assert kept(folder) == (["full", "delta"], {1: 1.0, 2: 2.0, 3: 3.0})
    assert (keeper.behind, keeper.health()["error"]) == (False, "")


def test_a_new_process_goes_on_with_deltas(tmp_path: Path) -> None:
    table = a_table()
    put(table, [1, 2], 1.0)
    keep(a_keeper(tmp_path), {"item": table}, 1)
    chain = newest_chain(tmp_path, OWNER)
    assert chain is not None
    again = a_table()
    put(again, [1, 2], 1.0)
    keeper = a_keeper(tmp_path)
    keeper.go_on_from(chain, {"item": again})
    put(again, [2], 5.0)
    keep(keeper, {"item": again}, 2)
    assert kept(tmp_path) == (["full", "delta"], {1: 1.0, 2: 5.0})
    head = newest_chain(tmp_path, OWNER)
    assert head is not None
    assert head.head.manifest.rows == {"item": 1}


class PlainTable:
    """A table that can only be exported whole."""

    def __init__(self, table: CpuTable) -> None:
        self._table = table

    def export(self, since_version: int = 0) -> Export:
        return self._table.export(since_version)


def test_a_table_that_cannot_be_copied_in_pieces_is_copied_whole_each_time(tmp_path: Path) -> None:
    table = a_table()
    keeper = a_keeper(tmp_path)
    for turn in (1, 2):
        put(table, [turn], float(turn))
        keep(keeper, {"item": PlainTable(table)}, turn)  # type: ignore[dict-item]
    assert kept(tmp_path) == (["full"], {1: 1.0, 2: 2.0})


def test_a_start_is_noted_and_gone_once_enough_full_snapshots_are_there(tmp_path: Path) -> None:
    keeper = a_keeper(tmp_path, full=1, deltas=0)
    keeper.keep_start(OWNER, log_at(50))
    keeper.wait()
    chain = newest_chain(tmp_path, OWNER)
    assert chain is not None
    assert (chain.from_release, chain.log) == (True, log_at(50))
    keep(keeper, {"item": a_table()}, 51)
    assert kept(tmp_path)[0] == ["full"]
    assert len(list(tmp_path.iterdir())) == 1
