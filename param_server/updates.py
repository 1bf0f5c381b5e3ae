"""What one record of the log does to the tables: in order, once, newest wins. Pure over tables and positions.

A record below the position of its partition was applied before and is skipped: positions make `add` exact. Versions
decide between writes to one key:

- a version given for each row is taken as it is;
- else a `base_version` other than 0 is the version of every row;
- else the log orders: `(log_epoch + 1) << 48 | offset`. It grows along a partition, is above any version below 2^48
  (releases carry 0 or 1), and stays above what went before when the broker has lost its log and offsets start again,
  because `log_epoch` counts those losses.

Producers of one key should keep to one of the three: microseconds since 1970, say, outrank the log's order for ever.
A record that cannot be applied becomes a letter with its reason; when only some rows find no room, a letter of those.
Neighbours of one kind that the log orders are applied together: their versions differ wherever their keys agree, so
the tables are the same as one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from param_server.contract import U64, BadRecord, Reason, UpdateBatch, encode_batch
from param_server.routing import partition_of
from param_server.table import Applied, EmbeddingTable, RowBatch

_OFFSET_BITS = 48


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One record of the log, decoded or found bad."""

    partition: int
    offset: int
    value: bytes
    content: UpdateBatch | BadRecord

    @property
    def rows(self) -> int:
        """Rows it holds, 0 when it is bad."""
        return self.content.keys.size if isinstance(self.content, UpdateBatch) else 0

    def joins(self, other: StreamRecord) -> bool:
        """Whether this one, coming right after the other, may be applied together with it."""
        ours, theirs = self.content, other.content
        return (
            isinstance(ours, UpdateBatch)
            and isinstance(theirs, UpdateBatch)
            and (ours.op, ours.table_id, ours.generation, ours.dim)
            == (theirs.op, theirs.table_id, theirs.generation, theirs.dim)
            and ours.versions is None
            and theirs.versions is None
            and ours.base_version == theirs.base_version == 0
        )


@dataclass(frozen=True, slots=True)
class Letter:
    """What goes to the dead-letter topic: the reason, where the record was, its bytes (or those refused) and rows."""

    reason: Reason
    detail: str
    partition: int
    offset: int
    value: bytes
    rows: int = 0


@dataclass(slots=True)
class Progress:
    """How far one partition is applied: `offset` is the next one wanted, `event_time_us` the latest applied."""

    offset: int = 0
    log_epoch: int = 0
    event_time_us: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What records did, in rows. `repeated` are records applied before; `oldest_us` is the oldest event applied now."""

    applied: int = 0
    stale: int = 0
    refused: int = 0
    repeated: int = 0
    oldest_us: int = 0
    letters: tuple[Letter, ...] = field(default=())


def apply_records(
    records: Sequence[StreamRecord],
    generations: Mapping[int, Mapping[int, EmbeddingTable] | None],
    progress: Mapping[int, Progress],
    n_partitions: int,
) -> Outcome:
    """Apply one record, or several of which each `joins` the one before, and move the positions past them.

    The table is `generations[generation][table_id]`; a generation that is None is the business of other shards and is
    passed over. `progress` is by partition.
    """
    letters: list[Letter] = []
    good: list[tuple[StreamRecord, UpdateBatch]] = []
    refused = repeated = 0
    for record in records:
        at = progress[record.partition]
        if record.offset < at.offset:
            repeated += 1
            continue
        at.offset = record.offset + 1
        if isinstance(record.content, UpdateBatch):
            good.append((record, record.content))
        else:
            letters.append(_letter(record, record.content))
    try:
        # Of records applied together each names the same table.
        table = _target(good[0][1], generations) if good else None
    except BadRecord as error:
        letters += [_letter(record, error) for record, _ in good]
        refused += sum(record.rows for record, _ in good)
        good, table = [], None
    if table is not None:
        good, strangers = _at_home(good, n_partitions)
        letters += strangers
        refused += sum(letter.rows for letter in strangers)
    if table is None or not good:
        return Outcome(refused=refused, repeated=repeated, letters=tuple(letters))
    done = table.apply(_together(good, progress))
    oldest_us = min(batch.event_time_us for _, batch in good)
    for record, batch in good:
        at = progress[record.partition]
        at.event_time_us = max(at.event_time_us, batch.event_time_us)
    letters += _letters(good, done)
    refused += done.full.size + done.overflow.size
    return Outcome(done.applied, done.stale, refused, repeated, oldest_us, tuple(letters))


def row_versions(batch: UpdateBatch, offset: int, log_epoch: int) -> U64:
    """Versions u64[n] of a record's rows; see the rule above."""
    if batch.versions is not None:
        return batch.versions
    return np.full(batch.keys.size, batch.base_version or log_version(offset, log_epoch), np.uint64)


def log_version(offset: int, log_epoch: int) -> int:
    """The version the log itself gives to the rows of a record."""
    return (log_epoch + 1) << _OFFSET_BITS | offset


def _letter(record: StreamRecord, error: BadRecord) -> Letter:
    return Letter(error.reason, error.detail, record.partition, record.offset, record.value, record.rows)


def _target(
    batch: UpdateBatch, generations: Mapping[int, Mapping[int, EmbeddingTable] | None]
) -> EmbeddingTable | None:
    if batch.generation not in generations:
        raise BadRecord("generation", f"generation {batch.generation} is not served here")
    tables = generations[batch.generation]
    if tables is None:
        return None
    table = tables.get(batch.table_id)
    if table is None:
        raise BadRecord("table", f"generation {batch.generation} has no table {batch.table_id}")
    if batch.dim != table.dim:
        raise BadRecord("dim", f"rows of {batch.dim}, table {batch.table_id} has rows of {table.dim}")
    return table


def _at_home(
    good: list[tuple[StreamRecord, UpdateBatch]], n_partitions: int
) -> tuple[list[tuple[StreamRecord, UpdateBatch]], list[Letter]]:
    """The records all of whose keys belong to their partitions, and letters for the others."""
    keys = good[0][1].keys if len(good) == 1 else np.concatenate([batch.keys for _, batch in good])
    expected = np.repeat([record.partition for record, _ in good], [batch.keys.size for _, batch in good])
    if (partition_of(keys, n_partitions) == expected).all():
        return good, []
    home: list[tuple[StreamRecord, UpdateBatch]] = []
    letters: list[Letter] = []
    for record, batch in good:
        if (partition_of(batch.keys, n_partitions) == record.partition).all():
            home.append((record, batch))
        else:
            detail = f"a key does not belong to partition {record.partition} of {n_partitions}"
            letters.append(_letter(record, BadRecord("misrouted", detail)))
    return home, letters


def _together(good: Sequence[tuple[StreamRecord, UpdateBatch]], progress: Mapping[int, Progress]) -> RowBatch:
    first = good[0][1]
    if len(good) == 1:
        record = good[0][0]
        versions = row_versions(first, record.offset, progress[record.partition].log_epoch)
        return RowBatch(
            first.op, first.keys, versions, first.rows, versioned_rows=first.versions is not None,
            order=log_version(record.offset, progress[record.partition].log_epoch),
        )  # fmt: skip
    orders = np.array([log_version(r.offset, progress[r.partition].log_epoch) for r, _ in good], np.uint64)
    return RowBatch(
        first.op,
        np.concatenate([batch.keys for _, batch in good]),
        np.repeat(orders, [batch.keys.size for _, batch in good]),
        np.concatenate([batch.rows for _, batch in good]),
    )


def _letters(good: Sequence[tuple[StreamRecord, UpdateBatch]], done: Applied) -> list[Letter]:
    """A letter for each record of which rows were refused, with these rows only."""
    refused: tuple[tuple[Reason, np.ndarray[tuple[int], np.dtype[np.int64]]], ...] = (
        ("table_full", done.full),
        ("overflow", done.overflow),
    )
    letters: list[Letter] = []
    for reason, positions in refused:
        if not positions.size:
            continue
        start = 0
        for record, batch in good:
            end = start + batch.keys.size
            mine = positions[(positions >= start) & (positions < end)] - start
            start = end
            if mine.size:
                detail = f"{mine.size} of {batch.keys.size} rows"
                value = encode_batch(batch.take(mine))
                letters.append(Letter(reason, detail, record.partition, record.offset, value, int(mine.size)))
    return letters
