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
"""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class Letter:
    """What goes to the dead-letter topic: the reason, where the record was, and its bytes (or those refused)."""

    reason: Reason
    detail: str
    partition: int
    offset: int
    value: bytes


@dataclass(slots=True)
class Progress:
    """How far one partition is applied: `offset` is the next one wanted, `event_time_us` the latest applied."""

    offset: int = 0
    log_epoch: int = 0
    event_time_us: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a record did, in rows. `repeated`: it was applied before."""

    applied: int = 0
    stale: int = 0
    refused: int = 0
    repeated: bool = False
    letters: tuple[Letter, ...] = field(default=())


def apply_record(
    record: StreamRecord,
    generations: Mapping[int, Mapping[int, EmbeddingTable]],
    progress: Progress,
    n_partitions: int,
) -> Outcome:
    """Apply one record to the table it names (`generations[generation][table_id]`) and move the position past it."""
    if record.offset < progress.offset:
        return Outcome(repeated=True)
    progress.offset = record.offset + 1
    if isinstance(record.content, BadRecord):
        return _refuse(record, record.content)
    batch = record.content
    try:
        table = _target(batch, generations, record.partition, n_partitions)
    except BadRecord as error:
        return _refuse(record, error)
    done = table.apply(
        RowBatch(batch.op, batch.keys, row_versions(batch, record.offset, progress.log_epoch), batch.rows,
                 versioned_rows=batch.versions is not None)
    )  # fmt: skip
    progress.event_time_us = max(progress.event_time_us, batch.event_time_us)
    letters = _letters(record, batch, done)
    return Outcome(done.applied, done.stale, done.full.size + done.overflow.size, letters=letters)


def row_versions(batch: UpdateBatch, offset: int, log_epoch: int) -> U64:
    """Versions u64[n] of a record's rows; see the rule above."""
    if batch.versions is not None:
        return batch.versions
    version = batch.base_version or ((log_epoch + 1) << _OFFSET_BITS | offset)
    return np.full(batch.keys.size, version, np.uint64)


def _target(
    batch: UpdateBatch,
    generations: Mapping[int, Mapping[int, EmbeddingTable]],
    partition: int,
    n_partitions: int,
) -> EmbeddingTable:
    if batch.generation not in generations:
        raise BadRecord("generation", f"generation {batch.generation} is not served here")
    table = generations[batch.generation].get(batch.table_id)
    if table is None:
        raise BadRecord("table", f"generation {batch.generation} has no table {batch.table_id}")
    if batch.dim != table.dim:
        raise BadRecord("dim", f"rows of {batch.dim}, table {batch.table_id} has rows of {table.dim}")
    if (partition_of(batch.keys, n_partitions) != partition).any():
        raise BadRecord("misrouted", f"a key does not belong to partition {partition} of {n_partitions}")
    return table


def _letters(record: StreamRecord, batch: UpdateBatch, done: Applied) -> tuple[Letter, ...]:
    refused: tuple[tuple[Reason, np.ndarray[tuple[int], np.dtype[np.int64]]], ...] = (
        ("table_full", done.full),
        ("overflow", done.overflow),
    )
    return tuple(
        Letter(
            reason,
            f"{rows.size} of {batch.keys.size} rows",
            record.partition,
            record.offset,
            encode_batch(batch.take(rows)),
        )
        for reason, rows in refused
        if rows.size
    )


def _refuse(record: StreamRecord, error: BadRecord) -> Outcome:
    rows = record.content.keys.size if isinstance(record.content, UpdateBatch) else 0
    letter = Letter(error.reason, error.detail, record.partition, record.offset, record.value)
    return Outcome(refused=rows, letters=(letter,))
