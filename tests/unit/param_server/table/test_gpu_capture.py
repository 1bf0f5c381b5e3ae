"""A capture of a GPU table is the table of one moment, whatever happens to it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import Capturing, RowBatch
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton
from tests.unit.param_server.captures import (
    DIM,
    Writes,
    check_a_delta,
    check_one_moment,
    rest,
    some_writes,
    write,
)

if TYPE_CHECKING:
    from param_server.table.gpu import GpuTable

pytestmark = NUMPY_MAY_OVERFLOW


def a_table(dtype: str = "f32") -> GpuTable:
    need_triton()
    from param_server.table.gpu import GpuTable

    return GpuTable(dim=DIM, capacity_rows=64, default_row=np.zeros(DIM, np.float32), dtype=dtype)


@settings(deadline=None, max_examples=6)  # each takes seconds in Triton's interpreter
@given(
    before=some_writes(5),
    between=some_writes(5),
    after=some_writes(5),
    piece=st.integers(1, 3),
    steps=st.integers(0, 2),
)
def test_full_and_delta_captures_are_of_one_moment_under_writes(
    before: Writes, between: Writes, after: Writes, piece: int, steps: int
) -> None:
    check_one_moment(a_table(), before, between, after, piece=piece, steps=steps)


def test_a_gpu_table_is_one_that_deltas_can_be_taken_of() -> None:
    assert isinstance(a_table(), Capturing)


def test_a_delta_holds_what_changed_since_the_capture_before_and_no_more() -> None:
    check_a_delta(a_table())


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
