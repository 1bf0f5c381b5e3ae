"""One embedding table on one device: the protocol every implementation keeps.

`tests/contract/test_embedding_table.py` runs on each of them, so that answers are the same. What all promise:

- every int64 is a legal key; a missing key is answered with the default row and `found` false, and is never stored;
- writes are ordered by version: `assign` and `delete` take effect iff their version is greater than the stored one (a
  key never seen accepts any); inside one batch the greatest version wins, and among equals the last position;
- a delete leaves a tombstone with its version, so that an older assign cannot bring the row back;
- `add` starts from zeros where there is no live row, never from the default row. Its order does not matter, so it is
  refused as stale only where the producer versioned each row; else it always adds and the version never goes down;
- capacity is fixed; keys seen and deleted count. A key that finds no room is reported, never dropped in silence.

An implementation has one owner thread; it takes no locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32, I64, U64, Op

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Writes to one table: keys i64[n], versions u64[n], rows f32[n, dim] (f32[0, dim] for a delete).

    `versioned_rows`: the producer gave each row its own version, so that an `add` can be stale. `order` is the place of
    the writes in the log; None where the versions are the places.
    """

    op: Op
    keys: I64
    versions: U64
    rows: F32
    versioned_rows: bool = False
    order: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """What a batch did. `full` and `overflow` are the positions refused for want of room, and because the sum of an
    `add` would not be finite: i64, ascending. A row superseded inside its batch counts as stale."""

    applied: int
    stale: int
    full: I64
    overflow: I64


@dataclass(frozen=True, slots=True)
class TopK:
    """The best rows for one query, best first: keys i64[k'], scores f32[k'], rows f32[k', dim]; k' <= k."""

    keys: I64
    scores: F32
    rows: F32


@dataclass(frozen=True, slots=True)
class Export:
    """Entries of a table, copied: keys i64[n], versions u64[n], tombstones bool[n], rows f32[n, dim] (zeros under a
    tombstone)."""

    keys: I64
    versions: U64
    tombstones: Bool
    rows: F32


class EmbeddingTable(Protocol):
    """A named set of rows of one dim."""

    @property
    def dim(self) -> int:
        """Width of a row."""
        ...

    @property
    def size(self) -> int:
        """Live rows."""
        ...

    @property
    def tombstones(self) -> int:
        """Deleted keys whose version is remembered."""
        ...

    @property
    def capacity_rows(self) -> int:
        """Most live rows and tombstones together."""
        ...

    @property
    def bytes(self) -> int:
        """Memory set aside, index included."""
        ...

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Return rows f32[n, dim] and found bool[n] for keys i64[n], in their order, duplicates included."""
        ...

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch; lookups before see none of it, lookups after all of it."""
        ...

    def topk(self, queries: F32, k: int, exclude: Sequence[I64] = ()) -> list[TopK]:
        """Return the k live rows of greatest dot product for each query f32[q, dim], exactly.

        `exclude` holds keys for each query (or is empty). Equal scores are ordered by key, ascending; a score that is
        not finite never wins.
        """
        ...

    def export(self, since_version: int = 0) -> Export:
        """Return every entry, tombstones included, whose version is at least `since_version`."""
        ...


class Capture(Protocol):
    """The entries of one moment, copied piece by piece while the table goes on changing."""

    @property
    def number(self) -> int:
        """What a later capture takes as `since` to hold what changed after this one."""
        ...

    def take(self, most_rows: int) -> Export | None:
        """The next piece of about `most_rows` entries, perhaps empty; None when everything was given out."""
        ...


@runtime_checkable
class CapturingWhole(Protocol):
    """A table that can be copied without a long stop, but does not know what changed after a copy."""

    def capture_all(self) -> Capture:
        """Begin a copy of this moment. One at a time: a new one ends the one before."""
        ...


@runtime_checkable
class Capturing(Protocol):
    """A table that can be copied without a long stop. One capture at a time: a new one ends the one before."""

    def mark(self) -> int:
        """A number to capture from: what changes from now on belongs to `capture(number)`."""
        ...

    def capture(self, since: int = 0) -> Capture:
        """Begin a copy of this moment: all entries, or those changed after the mark or capture numbered `since`."""
        ...
