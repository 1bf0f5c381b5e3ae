"""A capture is the table of one moment, whatever happens to it meanwhile."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table.cpu import CpuTable
from tests.unit.param_server.captures import DIM, Writes, check_a_delta, check_one_moment, rest, some_writes, write

TWELVE = some_writes(12)


def a_table(capacity_rows: int = 64) -> CpuTable:
    return CpuTable(dim=DIM, capacity_rows=capacity_rows, default_row=np.zeros(DIM, np.float32))


@given(before=TWELVE, between=TWELVE, after=TWELVE, last=TWELVE, piece=st.integers(1, 9), steps=st.integers(0, 4))
@settings(deadline=None)
def test_full_and_delta_captures_are_of_one_moment_under_writes(
    before: Writes, between: Writes, after: Writes, last: Writes, piece: int, steps: int
) -> None:
    check_one_moment(a_table(), before, between, after, piece=piece, steps=steps, last=last)


def test_a_delta_holds_what_changed_since_the_capture_before_and_no_more() -> None:
    check_a_delta(a_table())


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
