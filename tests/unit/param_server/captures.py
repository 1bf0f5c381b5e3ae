"""What a capture must be, whatever table it is of: the entries of one moment, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import Capture, Capturing, EmbeddingTable, Export, RowBatch

DIM = 2
Entries = dict[int, tuple[int, bool, tuple[float, ...]]]
Writes = Sequence[tuple[Op, list[int]]]


class Table(EmbeddingTable, Capturing, Protocol):
    """A table whose changes can be captured."""


def some_writes(most: int) -> st.SearchStrategy[Writes]:
    """Up to so many batches over 41 keys."""
    return st.lists(st.tuples(st.sampled_from(Op), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=most)


def entries(export: Export) -> Entries:
    """By key, which may come only once."""
    columns = (export.keys.tolist(), export.versions.tolist(), export.tombstones.tolist(), export.rows.tolist())
    found = {key: (version, dead, tuple(row)) for key, version, dead, row in zip(*columns, strict=True)}
    assert len(found) == export.keys.size, "a key came twice"
    return found


def rest(capture: Capture, most_rows: int = 3) -> Entries:
    """What is still to come; nothing may come twice."""
    found: Entries = {}
    while (piece := capture.take(most_rows)) is not None:
        assert not found.keys() & entries(piece).keys()
        found |= entries(piece)
    return found


def write(table: EmbeddingTable, op: Op, keys: list[int], version: int) -> None:
    """Rows that are their version."""
    rows = np.full((0 if op is Op.DELETE else len(keys), DIM), float(version), np.float32)
    table.apply(RowBatch(op, np.array(keys, np.int64), np.full(len(keys), version, np.uint64), rows))


def check_one_moment(
    table: Table, before: Writes, between: Writes, after: Writes, *, piece: int, steps: int, last: Writes = ()
) -> None:
    """A full and a delta capture of an empty table that is written to before, while and after they are copied."""
    version = 0
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


def check_a_delta(table: Table) -> None:
    """What changed since the capture before, and no more."""
    write(table, Op.ASSIGN, [1, 2, 3], 1)
    first = table.capture()
    write(table, Op.ASSIGN, [2], 2)
    assert rest(first) == dict.fromkeys((1, 2, 3), (1, False, (1.0, 1.0)))
    write(table, Op.DELETE, [3], 3)
    second = table.capture(first.number)
    assert rest(second) == {2: (2, False, (2.0, 2.0)), 3: (3, True, (0.0, 0.0))}
    assert rest(table.capture(second.number)) == {}


def state_of(parts: Sequence[Export]) -> dict[int, tuple[int, float]]:
    """Version and first number of every entry of a table without tombstones."""
    return {
        int(key): (int(version), float(row[0]))
        for part in parts
        for key, version, row in zip(part.keys, part.versions, part.rows, strict=True)
    }
