"""What is particular to the table in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.contract import Op
from param_server.table import RowBatch, kernels_cpu, kernels_recall
from param_server.table.cpu import CpuTable, warm

KERNELS = (
    kernels_cpu.lookup,
    kernels_cpu.assign,
    kernels_cpu.add,
    kernels_recall.rank,
    kernels_recall.settle,
    kernels_cpu.about_to_change,
    kernels_cpu.changed,
)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_after_warm_up_nothing_is_compiled_whatever_the_arrays_look_like() -> None:
    warm()
    compiled = [len(kernel.signatures) for kernel in KERNELS]
    assert compiled == [1] * len(KERNELS)
    table = CpuTable(dim=2, capacity_rows=100, default_row=read_only(np.ones(2, np.float32)))
    keys = read_only(np.arange(20, dtype=np.int64)[::2])
    versions = read_only(np.ones(20, np.uint64)[::2])
    rows = read_only(np.ones((2, 10), np.float32).T)
    for op in (Op.ASSIGN, Op.ADD, Op.DELETE):
        given = rows[:0] if op is Op.DELETE else rows
        table.apply(RowBatch(op, keys, versions, given, versioned_rows=op is Op.ADD))
        table.lookup(keys)
        table.topk(rows[:2], 3, (keys, keys[:0]))
        table.export()
        table.capture(table.mark()).take(2)
    assert [len(kernel.signatures) for kernel in KERNELS] == compiled


@pytest.mark.parametrize(("capacity_rows", "default_dim"), [(0, 2), (-1, 2), (2**32, 2), (8, 3)])
def test_an_impossible_table_is_refused(capacity_rows: int, default_dim: int) -> None:
    with pytest.raises(ValueError, match=r"capacity_rows|default_row"):
        CpuTable(dim=2, capacity_rows=capacity_rows, default_row=np.zeros(default_dim, np.float32))


def test_a_table_can_be_filled_to_the_last_row_and_searched_for_what_it_does_not_hold() -> None:
    n = 1 << 15
    table = CpuTable(dim=1, capacity_rows=n, default_row=np.zeros(1, np.float32))
    keys = np.arange(2 * n, dtype=np.int64)
    done = table.apply(RowBatch(Op.ASSIGN, keys, np.ones(2 * n, np.uint64), np.ones((2 * n, 1), np.float32)))
    assert (done.applied, done.full.size, table.size) == (n, n, n)
    assert int(table.lookup(keys)[1].sum()) == n


def test_memory_is_little_more_than_the_payload() -> None:
    table = CpuTable(dim=64, capacity_rows=100_000, default_row=np.zeros(64, np.float32))
    assert table.bytes / (100_000 * 64 * 4) < 1.15
