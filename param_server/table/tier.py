"""What `tiers.py` needs of a bounded table beside what every table promises, and the entries that move between tiers.

`TierTable` is kept by `evicting.py` in host memory and by `gpu_tier.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from param_server.contract import F32, I64, U64
from param_server.eviction import U32
from param_server.table import Bool, Capture, EmbeddingTable

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries on their way between tiers: keys i64[n], versions u64[n], tombstones bool[n], rows f32[n, dim] (zeros
    under a tombstone), scores u32[n]; `dirty` bool[n]: changed since they came from below, or never were below."""

    keys: I64
    versions: U64
    tombstones: Bool
    rows: F32
    scores: U32
    dirty: Bool

    @property
    def n(self) -> int:
        """How many."""
        return int(self.keys.size)

    def take(self, chosen: I64 | Bool | slice) -> Entries:
        """The chosen ones, copied unless a slice is given."""
        return Entries(
            self.keys[chosen], self.versions[chosen], self.tombstones[chosen], self.rows[chosen], self.scores[chosen],
            self.dirty[chosen],
        )  # fmt: skip


def room_for(n: int, dim: int) -> Entries:
    """Entries to be written over; of 0 rows: none."""
    return Entries(
        np.empty(n, np.int64), np.empty(n, np.uint64), np.empty(n, np.bool_), np.empty((n, dim), np.float32),
        np.empty(n, np.uint32), np.empty(n, np.bool_),
    )  # fmt: skip


def joined(parts: Sequence[Entries]) -> Entries:
    """All of them, in order; one at least."""
    parts = [part for part in parts if part.n] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    return Entries(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.versions for part in parts]),
        np.concatenate([part.tombstones for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.dirty for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class Upserted:
    """What an upsert did: rows written, rows not newer than what was there, positions i64 that found no room, and the
    entries that had to leave."""

    applied: int
    stale: int
    full: I64
    evicted: Entries


class TierTable(EmbeddingTable, Protocol):
    """A table of fixed size that loses rows. `apply` writes known keys only and reports all others as `full`."""

    @property
    def room(self) -> int:
        """New entries that are sure to find room without another having to leave."""
        ...

    def visit(self, keys: I64, tick: int) -> tuple[F32, Bool, int]:
        """`lookup` that counts as a use of every row found; rows, found and how many were."""
        ...

    def upsert(self, entries: Entries, *, force: bool) -> Upserted:
        """Write entries, newest wins; of a key not held, any version.

        Where there is no room the row of least score leaves, but none of this batch and none that is pinned. Without
        `force` only a row of lesser score leaves.
        """
        ...

    def remove(self, keys: I64, above: int = -1) -> Entries:
        """Take out those of keys (each once) that are held with a score greater than `above`."""
        ...

    def bury(self, keys: I64) -> Entries:
        """Take out those of keys that are held as tombstones."""
        ...

    def expire(self, below: int) -> Entries:
        """Take out some of the rows whose score is less; called again and again it finds all."""
        ...

    def weakest(self) -> int:
        """About the score a row must have to displace another."""
        ...

    def hottest(self, n: int) -> tuple[I64, U32]:
        """About the `n` keys of greatest score, greatest first, with their scores."""
        ...

    def pin(self, keys: I64) -> None:
        """Keep those of keys that are held."""
        ...

    def capture_all(self) -> Capture:
        """Begin a copy of this moment, to be taken in pieces while the table changes. Ends the one before."""
        ...

    def soil(self) -> None:
        """Take every row for changed: what was below is gone."""
        ...
