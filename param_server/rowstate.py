"""What one write does to one row: the rule of `table/__init__.py` for a row that is in no table. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from param_server.contract import F32, Op


class Verdict(IntEnum):
    """What became of a write."""

    APPLIED = 0
    STALE = 1
    OVERFLOW = 2


class RowState(NamedTuple):
    """Newest known state of a key: `row` f32[dim], None when it is deleted."""

    version: int
    row: F32 | None


class Write(NamedTuple):
    """One write to one key; `order` is its place in the log, `row` None for a delete."""

    op: Op
    version: int
    row: F32 | None
    versioned: bool
    order: int


def written(state: RowState | None, write: Write) -> tuple[RowState | None, Verdict]:
    """Return the state after a write to a key in that state (None: never seen), and whether it took effect."""
    if write.op is not Op.ADD:
        if state is not None and write.version <= state.version:
            return state, Verdict.STALE
        return RowState(write.version, write.row), Verdict.APPLIED
    if write.row is None:
        raise ValueError("an add needs a row")
    if state is not None and write.versioned and write.version <= state.version:
        return state, Verdict.STALE
    with np.errstate(over="ignore", invalid="ignore"):
        total = write.row if state is None or state.row is None else state.row + write.row
    if not np.isfinite(total).all():
        return state, Verdict.OVERFLOW
    return RowState(max(write.version, state.version if state else 0), total), Verdict.APPLIED
