"""A capture of a GPU table is the table of one moment, whatever happens to it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import Capture, Capturing, Export, RowBatch
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton

if TYPE_CHECKING:
    from param_server.table.gpu import GpuTable

pytestmark = NUMPY_MAY_OVERFLOW
DIM = 2
Entries = dict[int, tuple[int, bool, tuple[float, ...]]]


def a_table(dtype: str = "f32") -> GpuTable:
    need_triton()
    from param_server.table.gpu import GpuTable

    return GpuTable(dim=DIM, capacity_rows=64, default_row=np.zeros(DIM, np.float32), dtype=dtype)


def entries(export: Export) -> Entries:
    columns = (export.keys.tolist(), export.versions.tolist(), export.tombstones.tolist(), export.rows.tolist())
    found = {key: (version, dead, tuple(row)) for key, version, dead, row in zip(*columns, strict=True)}
    assert len(found) == export.keys.size, "a key came twice"
    return found


def rest(capture: Capture, most_rows: int = 1) -> Entries:
    """What is still to come; nothing may come twice."""
    found: Entries = {}
    while (piece := capture.take(most_rows)) is not None:
        assert not found.keys() & entries(piece).keys()
        found |= entries(piece)
    return found


def write(table: GpuTable, op: Op, keys: list[int], version: int) -> None:
    rows = np.full((0 if op is Op.DELETE else len(keys), DIM), float(version), np.float32)
    table.apply(RowBatch(op, np.array(keys, np.int64), np.full(len(keys), version, np.uint64), rows))


writes = st.lists(st.tuples(st.sampled_from(Op), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=5)


@settings(deadline=None, max_examples=6)  # each takes seconds in Triton's interpreter
@given(before=writes, between=writes, after=writes, piece=st.integers(1, 3), steps=st.integers(0, 2))
def test_full_and_delta_captures_are_of_one_moment_under_writes(
    before: list[tuple[Op, list[int]]], between: list[tuple[Op, list[int]]], after: list[tuple[Op, list[int]]],
    piece: int, steps: int,
) -> None:  # fmt: skip
    table, version = a_table(), 0
    for op, keys in before:
        write(table, op, keys, version := version + 1)
    mark = table.mark()
    at_mark = entries(table.export())
    for op, keys in between:
        write(table, op, keys, version := version + 1)
    for since in (0, mark):
        at_start = entries(table.export())
        capture = table.capture(since)
        found: Entries = {}
        for op, keys in after:
            write(table, op, keys, version := version + 1)
            for _ in range(steps):
                found |= entries(capture.take(piece) or table.export(version + 1))
        late = rest(capture, piece)
        assert not found.keys() & late.keys()
        found |= late
        assert (at_mark if since else {}) | found == at_start
        assert found.items() <= at_start.items()


def test_a_gpu_table_is_one_that_deltas_can_be_taken_of() -> None:
    assert isinstance(a_table(), Capturing)


def test_a_delta_holds_what_changed_since_the_capture_before_and_no_more() -> None:
    table = a_table()
    write(table, Op.ASSIGN, [1, 2, 3], 1)
    first = table.capture()
    write(table, Op.ASSIGN, [2], 2)
    assert rest(first) == dict.fromkeys((1, 2, 3), (1, False, (1.0, 1.0)))
    write(table, Op.DELETE, [3], 3)
    second = table.capture(first.number)
    assert rest(second) == {2: (2, False, (2.0, 2.0)), 3: (3, True, (0.0, 0.0))}
    assert rest(table.capture(second.number)) == {}


@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_narrow_rows_are_copied_aside_as_they_would_be_looked_up(dtype: str) -> None:
    table = a_table(dtype)
    table.apply(RowBatch(Op.ASSIGN, np.array([1]), np.array([1], np.uint64), np.array([[0.1, 100.0]], np.float32)))
    looked_up = table.lookup(np.array([1]))[0][0]
    capture = table.capture()
    write(table, Op.ASSIGN, [1], 2)
    assert rest(capture) == {1: (1, False, tuple(looked_up.tolist()))}


def test_keys_stay_where_they_are_during_a_capture_and_come_home_after(monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table()
    from param_server.table import gpu_write

    monkeypatch.setattr(gpu_write, "_TIDY_LOAD", -1.0)
    moved: list[int] = []
    monkeypatch.setattr(table.writer, "tidy", lambda keys, codes, mark: moved.append(keys.numel()))
    capture = table.capture()
    write(table, Op.ASSIGN, [1], 1)
    assert moved == []
    rest(capture)
    write(table, Op.ASSIGN, [2, 3], 2)
    assert moved == [2]


def test_a_stamp_moves_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tidy` brings home is still in the next delta, and what makes room for it is not."""
    from tests.unit.param_server.table.test_gpu import homes, seconds

    table = a_table()
    from param_server.table import gpu_write

    monkeypatch.setattr(gpu_write, "_TIDY_LOAD", 0.0)
    many = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 400 * 1031)
    home = many[homes(many) == 7]
    bucket = int(np.bincount(seconds(home), minlength=1031).argmax())
    far = home[seconds(home) == bucket][:1].tolist()
    crowd = home[seconds(home) != bucket][:8].tolist() + many[homes(many) == bucket][:8].tolist()
    write(table, Op.ASSIGN, crowd, 1)
    mark = table.mark()
    write(table, Op.ASSIGN, far, 2)
    assert set(rest(table.capture(mark))) == set(far)
    assert set(rest(table.capture())) == {*crowd, *far}
