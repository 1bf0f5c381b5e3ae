"""A log in Parquet read part by part: columns checked and ids numbered as `feature_service.folder` does for a whole.

    interactions*.parquet   user_id, item_id, event, ts      one file or many; read in the order of their names
    items.*, users.*        as in `feature_service.folder`

Refuses what a folder refuses, by file, column and row, and csv, which cannot be read part by part in bounded memory.
Invariant: one file read in parts gives the numbers, times and names it gives as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from feature_service.dataset import MAX_EVENT_NAMES, NOT_WANTED, ItemFacts, Known
from feature_service.folder import INTERACTIONS, MAX_ID_BYTES, UNITS, read_items, read_users, time_us
from infra.errors import InvalidInput

I64 = NDArray[np.int64]

PATTERN = "interactions*.parquet"
# Rows per part: a few dozen MB of columns.
PART_ROWS = 262_144
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Part:
    """Interactions in their order of appearance: row numbers i64[n] and times in microseconds i64[n]."""

    user: I64
    item: I64
    ts_us: I64


@dataclass(slots=True)
class LogParts:
    """The files of one folder. The numbers of users and items grow as parts are read."""

    folder: Path
    part_rows: int = PART_ROWS
    users: dict[str, int] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)
    _unit: str | None = None

    def files(self) -> list[Path]:
        """Its log files. Raises InvalidInput when there are none."""
        files = sorted(self.folder.glob(PATTERN))
        if not files:
            raise InvalidInput("data", f"{self.folder} has no {PATTERN}; a streamed log has to be in Parquet")
        return files

    def n_rows(self) -> int:
        """Rows of all files, for a progress bar. Raises InvalidInput."""
        try:
            return sum(int(pl.scan_parquet(path).select(pl.len()).collect().item()) for path in self.files())
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _unreadable(self.folder.name, error) from error

    def read(self) -> Iterator[Part]:
        """All parts, in order. Raises InvalidInput."""
        for path in self.files():
            row = 0
            for frame in _frames(path, self.part_rows):
                yield self._part(path, row, frame)
                row += frame.height
            if row == 0:
                raise InvalidInput(path.name, "the file has no rows")

    def known(self, name: str) -> Known:
        """Who and what the log speaks of, after all parts have been read, and what is known of them beside it."""
        facts, attributes = read_items(self.folder), read_users(self.folder)
        for numbers, described in ((self.items, facts), (self.users, attributes)):
            for other in described:
                numbers.setdefault(other, len(numbers))
        return Known(
            name=name,
            user_ids=list(self.users),
            item_ids=list(self.items),
            facts=[facts.get(i, ItemFacts()) for i in self.items],
            attributes=[dict(attributes.get(u, {})) for u in self.users],
            events=tuple(sorted(self.events - {NOT_WANTED})),
            fingerprint=self._fingerprint(),
        )

    def _part(self, path: Path, row: int, frame: pl.DataFrame) -> Part:
        users = _numbered(self.users, _ids(path, row, frame["user_id"]))
        items = _numbered(self.items, _ids(path, row, frame["item_id"]))
        events = frame["event"]
        _refuse_first(path, row, events, events.is_null() | (events == ""), "text is needed, found nothing")
        self.events.update(events.unique().to_list())
        if len(self.events) > MAX_EVENT_NAMES:
            raise InvalidInput(f"{path.name}: column event", f"more than {MAX_EVENT_NAMES} different names")
        wanted = (events != NOT_WANTED).to_numpy()
        return Part(users[wanted], items[wanted], self._times(path, row, frame["ts"])[wanted])

    def _times(self, path: Path, row: int, column: pl.Series) -> I64:
        """Times in microseconds; every row of the log has the unit of the first."""
        _refuse_first(path, row, column, column.is_null(), "a time is needed, found nothing")
        if isinstance(column.dtype, pl.Datetime):
            units, times = ["ISO 8601"], _of_datetimes(column)
        elif column.dtype.is_numeric():
            units, times = self._of_numbers(path, row, column)
        else:
            units, times = self._one_by_one(path, row, column)
        self._unit = self._unit or units[0]
        if set(units) != {self._unit}:
            other = next(unit for unit in units if unit != self._unit)
            raise InvalidInput(
                f"{path.name}: column ts", f"rows {row + 1} to {row + column.len()} hold {other}, row 1 {self._unit}"
            )
        return times

    def _of_numbers(self, path: Path, row: int, column: pl.Series) -> tuple[list[str], I64]:
        bounds = [bound for _, bound, _ in UNITS]
        bad = (column < 0) | (column >= bounds[-1]) | (column.cast(pl.Float64).is_nan())
        _refuse_first(path, row, column, bad, "is no time: unix seconds, milliseconds or microseconds are understood")
        values = column.to_numpy()
        found = np.searchsorted(np.asarray(bounds), values, side="right")
        units = [UNITS[int(unit)][0] for unit in np.unique(found)]
        _, _, factor = UNITS[int(found[0])]
        exact = np.rint(values * factor) if column.dtype.is_float() else values.astype(np.int64) * factor
        return units, exact.astype(np.int64)

    def _one_by_one(self, path: Path, row: int, column: pl.Series) -> tuple[list[str], I64]:
        times, units = np.empty(column.len(), np.int64), []
        for at, value in enumerate(column):
            try:
                unit, times[at] = time_us(value)
            except (ValueError, OverflowError) as error:
                raise InvalidInput(
                    f"{path.name}: column ts, row {row + at + 1}", f"{str(value)[:40]!r} is no time"
                ) from error
            units.append(unit)
        return units, times

    def _fingerprint(self) -> str:
        """The same as of the folder read as a whole, when the log is one file."""
        digest = hashlib.sha256()
        beside = [self.folder / f"{stem}.{kind}" for stem in ("items", "users") for kind in ("parquet", "csv")]
        for group in (self.files(), beside[:2], beside[2:]):
            present = [path for path in group if path.is_file()]
            for path in present:
                with path.open("rb") as file:
                    while block := file.read(_READ_BYTES):
                        digest.update(block)
            if not present:
                digest.update(b"\0")
        return digest.hexdigest()


def _frames(path: Path, rows: int) -> Iterator[pl.DataFrame]:
    """The four columns of one file, at most `rows` rows at a time. Raises InvalidInput."""
    try:
        scan = pl.scan_parquet(path, low_memory=True)
        columns = scan.collect_schema()
        for column in INTERACTIONS:
            if column not in columns:
                raise InvalidInput(path.name, f"column {column} is missing; the columns are {', '.join(columns)}")
        for column in columns:
            if column not in INTERACTIONS:
                raise InvalidInput(path.name, f"column {column} is unknown; allowed are {', '.join(INTERACTIONS)}")
        if columns["event"] != pl.String:
            raise InvalidInput(f"{path.name}: column event", f"text is needed, found {columns['event']}")
        for frame in scan.collect_batches(chunk_size=rows, maintain_order=True, lazy=True, engine="streaming"):
            for start in range(0, frame.height, rows):
                yield frame.slice(start, rows)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path.name, error) from error


def _unreadable(name: str, error: Exception) -> InvalidInput:
    first_line = (str(error).splitlines() or ["no reason given"])[0]
    return InvalidInput(name, f"cannot be read as parquet: {first_line}")


def _ids(path: Path, row: int, column: pl.Series) -> pl.Series:
    """Ids as text; integers count as their decimal digits."""
    if not (column.dtype.is_integer() or column.dtype == pl.String):
        raise InvalidInput(f"{path.name}: column {column.name}", f"an id is text or an integer, found {column.dtype}")
    _refuse_first(path, row, column, column.is_null(), "an id is text or an integer, found nothing")
    ids = column.cast(pl.String)
    length = ids.str.len_bytes()
    _refuse_first(path, row, ids, (length == 0) | (length > MAX_ID_BYTES), f"an id has 1 to {MAX_ID_BYTES} bytes")
    return ids


def _numbered(numbers: dict[str, int], ids: pl.Series) -> I64:
    """The row number of each id, new ones in their order of appearance."""
    distinct = ids.unique(maintain_order=True)
    rows = [numbers.setdefault(i, len(numbers)) for i in distinct.to_list()]
    table = pl.DataFrame({"id": distinct, "row": pl.Series(rows, dtype=pl.Int64)})
    return ids.to_frame("id").join(table, on="id", how="left", maintain_order="left")["row"].to_numpy()


def _of_datetimes(column: pl.Series) -> I64:
    """Microseconds since 1970 of times with or without a zone (then UTC)."""
    return column.dt.epoch("us").to_numpy()


def _refuse_first(path: Path, row: int, column: pl.Series, bad: pl.Series, detail: str) -> None:
    at = bad.arg_max() if bad.any() else None
    if at is not None:
        raise InvalidInput(f"{path.name}: column {column.name}, row {row + at + 1}", detail)
