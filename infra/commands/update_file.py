"""Reading a file of embedding rows for `trirank updates publish`.

npz: `ids` (raw ids) or `keys` (int64), `rows` f32[n, dim]; optional `titles`, `categories` ("a|b").
safetensors: `keys`, `rows`. parquet, csv: column `id` or `key`, optional `title`, `categories`; one list column `row`,
or every other column is one dimension in order. A delete needs no rows.
Refuses wrong content with InvalidInput that names the file and what is wrong.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, keys_of
from infra.errors import InvalidInput

NAMESPACE = {"user": USER, "user_attribute": ATTRIBUTE, "item": ITEM, "category": CATEGORY}
_NOT_DIMENSIONS = ("id", "key", "title", "categories")


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """ids (None when the file has keys), keys i64[n], rows f32[n, dim], titles and categories per row or None."""

    ids: list[str] | None
    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    titles: list[str] | None
    categories: list[list[str]] | None


def read_rows(path: Path, table: str, dim: int, *, with_rows: bool) -> UpdateRows:
    """Read a file for `table`, whose rows are `dim` wide; `with_rows=False` (a delete) takes keys alone."""
    if not path.is_file():
        raise InvalidInput(str(path), "there is no such file")
    columns = _columns(path)
    ids = [str(raw) for raw in columns["ids"]] if "ids" in columns else None
    if ids is None and "keys" not in columns:
        raise InvalidInput(str(path), "has neither ids nor keys")
    if ids is not None and table not in NAMESPACE:
        raise InvalidInput(str(path), f"table {table} has no ids: its keys are numbers; give keys")
    keys = keys_of(NAMESPACE[table], ids) if ids is not None else _keys(path, columns["keys"])
    rows = _rows(path, columns.get("rows"), keys.size, dim) if with_rows else np.empty((0, dim), np.float32)
    titles, categories = columns.get("titles"), columns.get("categories")
    return UpdateRows(
        ids,
        keys,
        rows,
        [str(title) for title in titles] if titles is not None else None,
        [[c for c in str(cell).split("|") if c] for cell in categories] if categories is not None else None,
    )


def _columns(path: Path) -> dict[str, NDArray[np.generic]]:
    match path.suffix:
        case ".npz":
            try:
                with np.load(path, allow_pickle=False) as archive:
                    return {name: archive[name] for name in archive.files}
            except (ValueError, zipfile.BadZipFile) as error:
                raise InvalidInput(str(path), f"is no readable npz file ({error})") from error
        case ".safetensors":
            try:
                return dict(load_file(path))
            except SafetensorError as error:
                raise InvalidInput(str(path), f"is no readable safetensors file ({error})") from error
        case ".parquet" | ".csv":
            try:
                frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)
            except (pl.exceptions.PolarsError, OSError) as error:
                raise InvalidInput(str(path), f"cannot be read ({error})") from error
            return _of_frame(path, frame)
        case suffix:
            raise InvalidInput(str(path), f"{suffix or 'no ending'}: use .npz, .safetensors, .parquet or .csv")


def _of_frame(path: Path, frame: pl.DataFrame) -> dict[str, NDArray[np.generic]]:
    names = {"id": "ids", "key": "keys", "title": "titles", "categories": "categories"}
    columns = {names[c]: frame[c].to_numpy() for c in frame.columns if c in names}
    dimensions = [c for c in frame.columns if c not in _NOT_DIMENSIONS]
    for column in dimensions:
        if frame[column].null_count():
            row = frame[column].is_null().arg_true()[0] + 1
            raise InvalidInput(str(path), f"column {column}, row {row}: is empty")
    if dimensions == ["row"]:
        lengths = frame["row"].list.len()
        if lengths.n_unique() > 1:
            raise InvalidInput(str(path), "column row: the lists differ in length")
        columns["rows"] = np.stack([np.asarray(cell, np.float32) for cell in frame["row"].to_list()])
    elif dimensions:
        for column in dimensions:
            if not frame[column].dtype.is_numeric():
                raise InvalidInput(str(path), f"column {column}: {frame[column].dtype} is not a number")
        columns["rows"] = frame.select(dimensions).to_numpy()
    return columns


def _keys(path: Path, raw: NDArray[np.generic]) -> NDArray[np.int64]:
    if raw.ndim != 1 or not np.issubdtype(raw.dtype, np.integer):
        raise InvalidInput(str(path), f"keys: want int64[n], got {raw.dtype}{list(raw.shape)}")
    return raw.astype(np.int64)


def _rows(path: Path, raw: NDArray[np.generic] | None, n: int, dim: int) -> NDArray[np.float32]:
    if raw is None:
        raise InvalidInput(str(path), "has no rows")
    if raw.shape != (n, dim):
        raise InvalidInput(str(path), f"rows: want [{n}, {dim}], got {list(raw.shape)}")
    rows = np.ascontiguousarray(raw, np.float32)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise InvalidInput(str(path), f"rows, row {bad[0] + 1}: is not finite")
    return rows
