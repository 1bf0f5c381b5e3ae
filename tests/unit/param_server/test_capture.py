"""A capture is the table of one moment, whatever happens to it meanwhile."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import Export, RowBatch
from param_server.table.capture import CpuCapture
from param_server.table.cpu import CpuTable

DIM = 2
Entries = dict[int, tuple[int, bool, tuple[float, ...]]]


def a_table(capacity_rows: int = 64) -> CpuTable:
    return CpuTable(dim=DIM, capacity_rows=capacity_rows, default_row=np.zeros(DIM, np.float32))


def entries(export: Export) -> Entries:
    columns = (export.keys.tolist(), export.versions.tolist(), export.tombstones.tolist(), export.rows.tolist())
    return {key: (version, dead, tuple(row)) for key, version, dead, row in zip(*columns, strict=True)}


def rest(capture: CpuCapture, most_rows: int = 3) -> Entries:
    """What is still to come; nothing may come twice."""
    found: Entries = {}
    while (piece := capture.take(most_rows)) is not None:
        assert not found.keys() & entries(piece).keys()
        found |= entries(piece)
    return found


def write(table: CpuTable, op: Op, keys: list[int], version: int) -> None:
    rows = np.full((0 if op is Op.DELETE else len(keys), DIM), float(version), np.float32)
    table.apply(RowBatch(op, np.array(keys, np.int64), np.full(len(keys), version, np.uint64), rows))


writes = st.lists(st.tuples(st.sampled_from(Op), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=12)


@given(before=writes, between=writes, after=writes, last=writes, piece=st.integers(1, 9), steps=st.integers(0, 4))
@settings(deadline=None)
def test_full_and_delta_captures_are_of_one_moment_under_writes(
    before: list[tuple[Op, list[int]]], between: list[tuple[Op, list[int]]], after: list[tuple[Op, list[int]]],
    last: list[tuple[Op, list[int]]], piece: int, steps: int,
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
        for op, keys in last:
            write(table, op, keys, version := version + 1)
        late = rest(capture, piece)
        assert not found.keys() & late.keys()
        found |= late
        assert (at_mark if since else {}) | found == at_start
        assert found.items() <= at_start.items()


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


def test_what_has_been_given_out_is_not_copied_again_when_it_changes() -> None:
    table = a_table()
    write(table, Op.ASSIGN, list(range(10)), 1)
    capture = table.capture()
    first = capture.take(5)
    assert first is not None
    write(table, Op.ASSIGN, list(range(10)), 2)
    late = rest(capture)
    assert set(late) == set(range(10)) - set(first.keys.tolist())
    assert {version for version, _, _ in late.values()} == {1}
