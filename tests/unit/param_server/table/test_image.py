"""A table from an image is the table that was put into it, whatever is done to it, and the file never changes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.generation import put
from param_server.table import Export, RowBatch
from param_server.table.cpu import CpuTable
from param_server.table.image import FORMAT, ImageRefused, Shape, build, load

DIM = 2
SHAPE = Shape(DIM, 24, np.array([7.0, 8.0], np.float32))
# Of an image of `some_rows`. When layout, hash or form of the file change, so must FORMAT, and then this.
GOLDEN = (1, "d5186789")

OPS = st.lists(
    st.tuples(
        st.sampled_from(Op),
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(-8, 8).map(float)), min_size=1, max_size=8
        ),
        st.booleans(),
        st.sampled_from(["", "mark", "full", "delta"]),
    ),
    max_size=10,
)


def some_rows(n: int = 10) -> Export:
    keys = np.arange(n, dtype=np.int64)
    rows = np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)
    return Export(keys, np.full(n, 3, np.uint64), np.zeros(n, np.bool_), rows)


def filled(state: Export) -> CpuTable:
    table = CpuTable(dim=DIM, capacity_rows=SHAPE.capacity_rows, default_row=SHAPE.default_row)
    assert put(table, state)
    return table


def write_image(path: Path, state: Export, name: str = "some") -> Path:
    def fill(table: CpuTable) -> None:
        assert put(table, state)

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        build(file, name, SHAPE, state.keys.size, fill)
    finally:
        os.close(file)
    return path


@contextmanager
def an_image(state: Export) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield write_image(Path(folder) / "image", state)


def same(one: Export | None, other: Export | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(
        np.array_equal(getattr(one, part), getattr(other, part)) for part in ("keys", "versions", "tombstones", "rows")
    )


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 24), ops=OPS)
def test_under_any_stream_of_operations_it_equals_a_table_filled_from_the_release(n: int, ops: list[tuple]) -> None:
    with an_image(some_rows(n)) as path:
        before = path.read_bytes()
        tables = (filled(some_rows(n)), load(path, "some", SHAPE)[0])
        marks: list[int] = [0]
        for op, writes, versioned, then in ops:
            keys, versions, values = (np.array(column) for column in zip(*writes, strict=True))
            rows = np.repeat(values.astype(np.float32)[: 0 if op is Op.DELETE else None, None], DIM, axis=1)
            batch = RowBatch(op, keys.astype(np.int64), versions.astype(np.uint64), rows, versioned_rows=versioned)
            done = [table.apply(batch) for table in tables]
            assert [d.applied for d in done] == [done[0].applied] * 2
            assert done[0].full.tolist() == done[1].full.tolist()
            if then == "mark":
                marks.append(tables[0].mark())
                assert tables[1].mark() == marks[-1]
            elif then:
                captures = [table.capture(marks[-1] if then == "delta" else 0) for table in tables]
                marks.append(captures[0].number)
                for _ in range(2):
                    assert same(captures[0].take(3), captures[1].take(3))
        assert same(tables[0].export(), tables[1].export())
        assert [(t.size, t.tombstones, t.bytes) for t in tables] == [
            (tables[0].size, tables[0].tombstones, tables[0].bytes)
        ] * 2
        everything = np.arange(32, dtype=np.int64)
        for got, wanted in zip(tables[1].lookup(everything), tables[0].lookup(everything), strict=True):
            np.testing.assert_array_equal(got, wanted)
        query = np.array([[1.0, -0.5]], np.float32)
        np.testing.assert_array_equal(tables[1].topk(query, 5)[0].keys, tables[0].topk(query, 5)[0].keys)
        assert path.read_bytes() == before


def test_two_tables_of_one_image_see_their_own_updates_only(tmp_path: Path) -> None:
    path = write_image(tmp_path / "image", some_rows())
    one, other = (load(path, "some", SHAPE)[0] for _ in range(2))
    row = np.array([[5.0, 5.0]], np.float32)
    one.apply(RowBatch(Op.ASSIGN, np.array([1]), np.array([9], np.uint64), row))
    other.apply(RowBatch(Op.DELETE, np.array([1]), np.array([9], np.uint64), row[:0]))
    other.apply(RowBatch(Op.ASSIGN, np.array([20]), np.array([9], np.uint64), row))
    assert one.lookup(np.array([1, 20]))[1].tolist() == [True, False]
    assert other.lookup(np.array([1, 20]))[1].tolist() == [False, True]
    assert same(load(path, "some", SHAPE)[0].export(), filled(some_rows()).export())


def test_an_image_whose_file_is_removed_stays_usable(tmp_path: Path) -> None:
    path = write_image(tmp_path / "image", some_rows())
    table, _ = load(path, "some", SHAPE)
    path.unlink()
    table.apply(RowBatch(Op.DELETE, np.array([1]), np.array([9], np.uint64), np.empty((0, DIM), np.float32)))
    assert table.size == 9


def offsets_of_what_counts(path: Path) -> list[int]:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    return np.flatnonzero(content).tolist()


def test_a_flipped_byte_anywhere_that_counts_is_noticed(tmp_path: Path) -> None:
    path = write_image(tmp_path / "image", some_rows())
    whole = path.read_bytes()
    for at in offsets_of_what_counts(path):
        damaged = bytearray(whole)
        damaged[at] ^= 64
        (other := tmp_path / f"{at}").write_bytes(damaged)
        with pytest.raises(ImageRefused):
            load(other, "some", SHAPE)
        other.unlink()


@pytest.mark.parametrize("size", [0, 10, -1, -100_000])
def test_a_file_of_another_size_is_refused_before_it_is_mapped(tmp_path: Path, size: int) -> None:
    path = write_image(tmp_path / "image", some_rows())
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(ImageRefused, match="bytes, not"):
        load(path, "some", SHAPE)


def test_an_image_of_another_name_or_none_is_refused(tmp_path: Path) -> None:
    path = write_image(tmp_path / "image", some_rows())
    with pytest.raises(ImageRefused, match="another table's"):
        load(path, "other", SHAPE)
    with pytest.raises(ImageRefused, match="not there"):
        load(tmp_path / "none", "some", SHAPE)


def test_a_build_that_is_cut_short_leaves_nothing_that_could_be_loaded(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def fill(table: CpuTable) -> None:
        assert put(table, some_rows())
        raise Interrupted

    file = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    with pytest.raises(Interrupted):
        build(file, "some", SHAPE, 10, fill)
    os.close(file)
    with pytest.raises(ImageRefused, match="head"):
        load(tmp_path / "image", "some", SHAPE)


def test_what_is_behind_the_last_entry_takes_no_room_on_disk(tmp_path: Path) -> None:
    shape = Shape(64, 100_000, np.zeros(64, np.float32))
    file = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    build(file, "some", shape, 0, lambda table: None)
    about = os.fstat(file)
    os.close(file)
    assert about.st_size > 100_000 * 64 * 4
    assert about.st_blocks * 512 < 2_000_000


def test_the_form_of_an_image_has_not_changed_without_another_number(tmp_path: Path) -> None:
    content = write_image(tmp_path / "image", some_rows()).read_bytes()
    assert (FORMAT, hashlib.sha256(content).hexdigest()[:8]) == GOLDEN
