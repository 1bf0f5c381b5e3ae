"""A user's own data: a folder with `interactions.parquet|csv` and, optional, `items` and `users` beside it.

    interactions   user_id, item_id, event, ts      ts: unix seconds, milliseconds or microseconds, or ISO 8601
    items          item_id, title?, categories?     categories separated by |
    users          user_id, one column per categorical attribute

Nothing is guessed or skipped: a column too few or too many, a value of the wrong type, an empty file, an id that is
described twice is an InvalidInput that names file, column and row (data rows count from 1; for csv the line of the
file, header included, as well).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from feature_service.dataset import MAX_CATEGORIES, MAX_EVENT_NAMES, Dataset, ItemFacts, make_dataset
from infra.errors import InvalidInput

I64 = NDArray[np.int64]

MAX_ID_BYTES = 256
INTERACTIONS = ("user_id", "item_id", "event", "ts")
_ITEMS = ("item_id", "title", "categories")
# Upper bound of each unit, and what one of it is in microseconds. A bound is the year 5138 in that unit.
UNITS = (("seconds", 1e11, 1_000_000), ("milliseconds", 1e14, 1_000), ("microseconds", 1e17, 1))


@dataclass(frozen=True, slots=True)
class _Table:
    """One file as columns of Python values."""

    path: Path
    columns: dict[str, list[Any]]
    n_rows: int

    def refuse(self, column: str, row: int, detail: str) -> InvalidInput:
        """The error for the value in `column` of data row `row`, counted from 0."""
        line = f" (line {row + 2})" if self.path.suffix == ".csv" else ""
        return InvalidInput(f"{self.path.name}: column {column}, row {row + 1}{line}", detail)


def read_folder(folder: Path) -> Dataset:
    """Read the files of one folder. Raises InvalidInput."""
    log = _read(folder, "interactions", required=INTERACTIONS, allowed=INTERACTIONS)
    if log is None:
        raise InvalidInput("data", f"{folder} has neither interactions.parquet nor interactions.csv")
    items = _read(folder, "items", required=("item_id",), allowed=_ITEMS)
    users = _read(folder, "users", required=("user_id",), allowed=None)
    events = _texts(log, "event")
    if len(set(events)) > MAX_EVENT_NAMES:
        raise InvalidInput(f"{log.path.name}: column event", f"more than {MAX_EVENT_NAMES} different names")
    digest = hashlib.sha256()
    for table in (log, items, users):
        digest.update(b"\0" if table is None else table.path.read_bytes())
    return make_dataset(
        folder.name,
        users=_ids(log, "user_id"),
        items=_ids(log, "item_id"),
        ts_us=_times(log),
        events=events,
        facts={} if items is None else _facts(items),
        attributes={} if users is None else _attributes(users),
        fingerprint=digest.hexdigest(),
    )


def read_items(folder: Path) -> dict[str, ItemFacts]:
    """What `items` says, nothing when there is no such file. Raises InvalidInput."""
    items = _read(folder, "items", required=("item_id",), allowed=_ITEMS)
    return {} if items is None else _facts(items)


def read_users(folder: Path) -> dict[str, dict[str, str]]:
    """What `users` says, nothing when there is no such file. Raises InvalidInput."""
    users = _read(folder, "users", required=("user_id",), allowed=None)
    return {} if users is None else _attributes(users)


def _read(folder: Path, stem: str, *, required: tuple[str, ...], allowed: tuple[str, ...] | None) -> _Table | None:
    """The file `stem` of either format, or None when there is none."""
    found = [path for path in (folder / f"{stem}.parquet", folder / f"{stem}.csv") if path.is_file()]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidInput(found[1].name, f"there is a {found[0].name} too; keep one of them")
    path = found[0]
    try:
        frame = pl.read_csv(path, infer_schema=False) if path.suffix == ".csv" else pl.read_parquet(path)
    except pl.exceptions.NoDataError as error:
        raise InvalidInput(path.name, "the file is empty") from error
    except (pl.exceptions.PolarsError, OSError, UnicodeError) as error:
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        raise InvalidInput(path.name, f"cannot be read as {path.suffix[1:]}: {first_line}") from error
    for column in required:
        if column not in frame.columns:
            raise InvalidInput(path.name, f"column {column} is missing; the columns are {', '.join(frame.columns)}")
    for column in frame.columns:
        if allowed is not None and column not in allowed:
            raise InvalidInput(path.name, f"column {column} is unknown; allowed are {', '.join(allowed)}")
    if frame.height == 0:
        raise InvalidInput(path.name, "the file has no rows")
    return _Table(path, {name: frame[name].to_list() for name in frame.columns}, frame.height)


def _texts(table: _Table, column: str) -> list[str]:
    """Values of a text column; none may be missing."""
    values = table.columns[column]
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value:
            found = "nothing" if value is None or value == "" else f"{value!r}"
            raise table.refuse(column, row, f"text is needed, found {found}")
    return values


def _ids(table: _Table, column: str) -> list[str]:
    """Ids as text; integers count as their decimal digits."""
    ids = table.columns[column]
    for row, value in enumerate(ids):
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise table.refuse(column, row, f"an id is text or an integer, found {_shown(value)}")
        if not 0 < len(str(value).encode()) <= MAX_ID_BYTES:
            raise table.refuse(column, row, f"an id has 1 to {MAX_ID_BYTES} bytes")
    return [str(value) for value in ids]


def _distinct_ids(table: _Table, column: str) -> list[str]:
    ids = _ids(table, column)
    first: dict[str, int] = {}
    for row, value in enumerate(ids):
        if first.setdefault(value, row) != row:
            raise table.refuse(column, row, f"{value!r} is described in row {first[value] + 1} already")
    return ids


def _facts(table: _Table) -> dict[str, ItemFacts]:
    ids = _distinct_ids(table, "item_id")
    facts = {}
    for row, item_id in enumerate(ids):
        title = table.columns.get("title", [None] * table.n_rows)[row]
        if title is not None and not isinstance(title, str):
            raise table.refuse("title", row, f"text is needed, found {_shown(title)}")
        facts[item_id] = ItemFacts(title or "", _categories(table, row))
    return facts


def _categories(table: _Table, row: int) -> tuple[str, ...]:
    value = table.columns.get("categories", [None] * table.n_rows)[row]
    if value is None:
        return ()
    parts = value.split("|") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise table.refuse("categories", row, f"text separated by | is needed, found {_shown(value)}")
    names = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if len(names) > MAX_CATEGORIES:
        raise table.refuse("categories", row, f"{len(names)} categories; at most {MAX_CATEGORIES} are used")
    return names


def _attributes(table: _Table) -> dict[str, dict[str, str]]:
    ids = _distinct_ids(table, "user_id")
    known: dict[str, dict[str, str]] = {user_id: {} for user_id in ids}
    for column in table.columns:
        if column == "user_id":
            continue
        for row, value in enumerate(table.columns[column]):
            if isinstance(value, float) or not (value is None or isinstance(value, (str, int))):
                raise table.refuse(column, row, f"an attribute is text or an integer, found {_shown(value)}")
            if value is not None and value != "":
                known[ids[row]][column] = str(value).lower() if isinstance(value, bool) else str(value)
    return known


def _times(table: _Table) -> I64:
    """The column `ts` in microseconds, i64[n]; every row has the unit of the first."""
    times = np.empty(table.n_rows, np.int64)
    wanted = None
    for row, value in enumerate(table.columns["ts"]):
        try:
            unit, times[row] = time_us(value)
        except (ValueError, OverflowError) as error:
            kinds = "unix seconds, milliseconds or microseconds, or ISO 8601"
            raise table.refuse("ts", row, f"{_shown(value)} is no time: {kinds} are understood") from error
        wanted = wanted or unit
        if unit != wanted:
            raise table.refuse("ts", row, f"{_shown(value)} looks like {unit}, row 1 like {wanted}")
    return times


def time_us(value: Any) -> tuple[str, int]:
    """(unit, microseconds since 1970) of one value. Raises ValueError."""
    if isinstance(value, str):
        number = next(_numbers(value), None)
        moment = datetime.fromisoformat(value.strip()) if number is None else number
    elif isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime.combine(value, time())
    else:
        moment = value
    if isinstance(moment, datetime):
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return "ISO 8601", round(aware.timestamp() * 1e6)
    if not isinstance(moment, (int, float)) or isinstance(moment, bool) or not 0 <= moment < UNITS[-1][1]:
        raise ValueError(value)
    unit, _, factor = next(entry for entry in UNITS if moment < entry[1])
    return unit, round(moment * factor)


def _numbers(text: str) -> Iterator[int | float]:
    """`text` as a number, if it is one. A bare year is one too: ISO dates have dashes or eight digits with a T."""
    for kind in (int, float):
        try:
            yield kind(text)
        except ValueError:
            continue


def _shown(value: object) -> str:
    """A value in an error message: short, and never more than its first 40 characters."""
    return "nothing" if value is None or value == "" else repr(value)[:40]
