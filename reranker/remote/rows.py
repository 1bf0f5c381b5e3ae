"""What a training needs of a parameter server: rows of a step, and changes to them that become visible in time.

`RowService` is the seam: `StackRows` keeps it over shards and Kafka, and one contract suite runs on it and on the rows
in memory that tests use. Pure; refuses nothing. Invariant: a step's number orders everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.errors import Permanent, Retryable

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]


class RowsUnavailable(Retryable):
    """The parameter server did not give rows, or did not apply changes, in time. Action: look at the stack, then train
    again."""


class RowsRefused(Permanent):
    """Tables that are not for this training, or have no room for its rows. Action: start the stack as the message says,
    then train again."""


@dataclass(frozen=True, slots=True)
class Rows:
    """rows f32[n, dim] and found bool[n] of the keys asked for, in their order."""

    rows: F32
    found: BOOL


@dataclass(frozen=True, slots=True)
class Change:
    """Rows of one table: keys i64[n] distinct, rows f32[n, dim]. `first`: the values of rows that were missing, which
    take effect only where there is still none; else numbers to add."""

    table: str
    keys: I64
    rows: F32
    first: bool = False


class RowService(Protocol):
    """Rows of all tables. Used by one thread."""

    def check(self, schema_fingerprint: str, n_rows: Mapping[str, int]) -> int:
        """Rows that are there already. Raises RowsRefused unless the tables are for this schema and have room for so
        many rows each."""
        ...

    def fetch(self, keys: Mapping[str, I64], applied: int) -> Future[Mapping[str, Rows]]:
        """Rows of each table's keys, once the changes of step `applied` and all before are visible; -1: at once.

        The future raises RowsUnavailable.
        """
        ...

    def publish(self, step: int, changes: Sequence[Change]) -> None:
        """Hand over the changes of a step, in order; steps are published one after another, none left out.

        Raises RowsUnavailable when those of an earlier step could not be written.
        """
        ...
