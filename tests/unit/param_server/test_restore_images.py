"""A shard that begins with images and lays its snapshots over them ends as one that fills its tables from nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.release import Release
from param_server.contract import Op
from param_server.generation import Generation, Place, empty_generation
from param_server.images import Begun, Images
from param_server.keeper import Keeping, SnapshotKeeper
from param_server.residence import shared_and_private
from param_server.restore import Part, Restored, restore
from param_server.routing import partitions_of_shard
from param_server.snapshot import LogState, Position, Snapshot, folder_of, write_snapshot
from param_server.table import EmbeddingTable, Export, RowBatch
from param_server.table.cpu import CpuTable
from tests.unit.param_server.captures import entries, rest
from tests.unit.param_server.support import StillClock
from tests.unit.param_server.test_generation import KEYS, a_release
from tests.unit.param_server.test_restore import ALL, N_PARTITIONS, keep, owner

ROOM = {"headroom": 4.0, "min_capacity_rows": 1}
# Low versions beside the log's: an `add` may change a row and leave its version.
WRITES = st.lists(
    st.tuples(
        st.sampled_from(Op),
        st.lists(st.integers(0, 120), min_size=1, max_size=12),
        st.sampled_from([0, 1, 2, 1 << 48]),
        st.floats(-4, 4, width=32),
    ),
    max_size=5,
)
ROUNDS = st.lists(st.tuples(WRITES, WRITES, st.integers(1, 3)), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return a_release(tmp_path_factory.mktemp("release"))


class Root:
    """Snapshots of one stack, and the images of its shards."""

    def __init__(self, folder: Path, release: Release) -> None:
        self.folder = folder
        self.release = release
        self.images: Images | None = None

    def start(self, n_shards: int, index: int, *, images: bool, room: dict[str, float] = ROOM) -> Restored:
        place = Place(index, n_shards, N_PARTITIONS)
        self.images = Images(self.folder / "images") if images else None

        def empty() -> Generation:
            return empty_generation(self.release, place, **room)

        def begin() -> Begun:
            assert self.images is not None
            return self.images.begin(self.release, place, **room)

        mine = partitions_of_shard(index, N_PARTITIONS, n_shards)
        whose = owner(self.release, n_shards, index)
        return restore(self.folder / "s", whose, mine, self.release, empty, begin if images else None)


@pytest.fixture
def root(tmp_path: Path, release: Release) -> Root:
    return Root(tmp_path, release)


def table_of(restored: Restored) -> CpuTable:
    table = restored.generation.tables["item"]
    assert isinstance(table, CpuTable)
    return table


def write(table: EmbeddingTable, writes: list[tuple[Op, list[int], int, float]], part: Part, at: int) -> None:
    for n, (op, keys, base, value) in enumerate(writes):
        mine = np.array(keys, np.int64)
        mine = mine[part.owns(mine)]
        rows = np.full((0 if op is Op.DELETE else mine.size, 2), value, np.float32)
        table.apply(RowBatch(op, mine, np.full(mine.size, base + (at + n if base > 2 else 0), np.uint64), rows))


@settings(deadline=None, max_examples=20)
@given(rounds=ROUNDS)
def test_whatever_was_written_and_saved_both_ways_of_starting_agree(
    release: Release, rounds: list[tuple[list, list, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, offset = Root(Path(folder), release), 0
        for before, after, n_shards in rounds:
            for index in range(n_shards):
                filled = root.start(n_shards, index, images=False)
                laid = root.start(n_shards, index, images=True)
                assert root.images is not None
                assert root.images.private == {}
                assert entries(table_of(laid).export()) == entries(table_of(filled).export())
                assert (table_of(laid).size, laid.log, laid.source) == (
                    table_of(filled).size, filled.log, filled.source,
                )  # fmt: skip
            offset += 10
            for index in range(n_shards):
                _live_and_save(root, n_shards, index, before, after, offset)


def _live_and_save(root: Root, n_shards: int, index: int, before: list, after: list, offset: int) -> None:
    """Serve for a while, with a snapshot between the writes and one at the end; most are deltas."""
    restored = root.start(n_shards, index, images=True)
    table = table_of(restored)
    mine = partitions_of_shard(index, N_PARTITIONS, n_shards)
    keeper = SnapshotKeeper(folder_of(root.folder / "s", n_shards, index), Keeping(deltas=3), StillClock())
    if restored.goes_on is not None:
        keeper.go_on_from(restored.goes_on, restored.generation.tables)
    for n, writes in enumerate((before, after)):
        write(table, writes, Part(mine, N_PARTITIONS), offset + n)
        log = LogState("log", {p: Position(offset + n, 0, 0) for p in mine}, 0, 0)
        keeper.keep_now(owner(root.release, n_shards, index), log, restored.generation.tables)
        assert keeper.health()["failed"] == 0


def test_a_delta_after_a_start_from_an_image_holds_what_changed_and_no_more(root: Root) -> None:
    keep(root.folder / "s", root.release, 1, 0, 50, 2.0)
    tables = [table_of(root.start(1, 0, images=images)) for images in (False, True)]
    found = []
    for table in tables:
        mark = table.mark()
        write(table, [(Op.ASSIGN, [3, 150], 1 << 48, 9.0), (Op.DELETE, [7], 1 << 48, 0.0)], Part((*range(8),), 8), 1)
        found.append(rest(table.capture(mark)))
    assert found[0] == found[1]
    assert found[1].keys() == {3, 7, 150}


def test_rows_that_are_as_the_release_has_them_stay_shared_after_a_full_snapshot(root: Root) -> None:
    same = Export(KEYS, np.ones(100, np.uint64), np.zeros(100, np.bool_), np.ones((100, 2), np.float32))
    _save_full(root, same)
    table = table_of(root.start(1, 0, images=True))
    assert table.size == 100
    assert root.images is not None
    found = shared_and_private(root.images.mapped["item"])
    assert found is not None
    assert found[1] == 0


def test_a_full_snapshot_without_a_row_of_the_release_has_the_last_word(root: Root) -> None:
    some = KEYS[10:]
    _save_full(root, Export(some, np.ones(90, np.uint64), np.zeros(90, np.bool_), np.ones((90, 2), np.float32)))
    restored = root.start(1, 0, images=True)
    assert sorted(entries(table_of(restored).export())) == some.tolist()
    assert root.images is not None
    assert root.images.mapped == {}
    assert "lacks rows" in root.images.private["item"]


def test_a_snapshot_without_room_is_refused_and_the_rows_of_the_release_are_an_images(root: Root) -> None:
    keep(root.folder / "s", root.release, 1, 0, 50, 2.0)
    room = {"headroom": 1.0, "min_capacity_rows": 1}
    filled, laid = (root.start(1, 0, images=images, room=room) for images in (False, True))
    assert (laid.log, laid.source, laid.refused) == (filled.log, filled.source, filled.refused)
    assert entries(table_of(laid).export()) == entries(table_of(filled).export())
    assert set(table_of(laid).lookup(KEYS)[0].ravel().tolist()) == {1.0}
    assert root.images is not None
    assert list(root.images.mapped) == ["item"]


def test_a_minus_zero_is_another_row_than_zero(root: Root) -> None:
    rows = np.ones((200, 2), np.float32)
    rows[5] = -0.0
    zero = Export(ALL, np.ones(200, np.uint64), np.zeros(200, np.bool_), rows)
    _save_full(root, zero)
    table = table_of(root.start(1, 0, images=True))
    table.lay(Export(ALL[5:6], zero.versions[5:6], zero.tombstones[5:6], np.zeros((1, 2), np.float32)))
    assert not np.signbit(table.lookup(ALL[5:6])[0]).any()


def _save_full(root: Root, entries: Export) -> None:
    log = LogState("log", {p: Position(5, 0, 5) for p in range(N_PARTITIONS)}, 0, 0)
    snapshot = Snapshot("full", "full", owner(root.release, 1, 0), 5, log, {"item": [entries]})
    write_snapshot(folder_of(root.folder / "s", 1, 0), snapshot)
