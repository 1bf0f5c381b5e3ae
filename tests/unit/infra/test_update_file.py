"""Files of embedding rows: what can be read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from feature_service.hashing import ITEM, keys_of
from infra.commands.update_file import read_rows
from infra.errors import InvalidInput

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def _write(path: Path, **changed: object) -> Path:
    """A good file of the kind its ending says, with some columns changed; None leaves one out."""
    if path.suffix in (".npz", ".safetensors"):
        names = {"keys": np.array([1, 2])} if path.suffix == ".safetensors" else {"ids": np.array(["a", "b"])}
        arrays = {k: v for k, v in {**names, "rows": ROWS, **changed}.items() if v is not None}
        save_file(arrays, path) if path.suffix == ".safetensors" else np.savez(path, **arrays)
        return path
    columns = {"id": ["a", "b"], **{f"d{i}": ROWS[:, i] for i in range(4)}, **changed}
    frame = pl.DataFrame({k: v for k, v in columns.items() if v is not None})
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".csv"])
def test_ids_become_the_keys_that_serving_uses(tmp_path: Path, ending: str) -> None:
    read = read_rows(_write(tmp_path / f"rows{ending}"), "item", 4, with_rows=True)
    np.testing.assert_array_equal(read.keys, keys_of(ITEM, ["a", "b"]))
    np.testing.assert_array_equal(read.rows, ROWS)


def test_keys_are_taken_as_they_are(tmp_path: Path) -> None:
    read = read_rows(_write(tmp_path / "rows.safetensors"), "gap", 4, with_rows=True)
    assert read.keys.tolist() == [1, 2]
    assert read.ids is None


def test_a_list_column_holds_a_row(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.parquet", d0=None, d1=None, d2=None, d3=None, row=ROWS.tolist())
    np.testing.assert_array_equal(read_rows(path, "item", 4, with_rows=True).rows, ROWS)


def test_titles_and_categories_come_along(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.csv", title=["A", "B"], categories=["x|y", "z"])
    read = read_rows(path, "item", 4, with_rows=True)
    assert read.titles == ["A", "B"]
    assert read.categories == [["x", "y"], ["z"]]


def test_a_delete_needs_no_rows(tmp_path: Path) -> None:
    read = read_rows(_write(tmp_path / "rows.npz", rows=None), "item", 4, with_rows=False)
    assert read.rows.shape == (0, 4)


@pytest.mark.parametrize(
    ("ending", "changed", "message"),
    [
        (".npz", {"rows": None}, "has no rows"),
        (".npz", {"ids": None}, "neither ids nor keys"),
        (".npz", {"rows": ROWS[:, :3]}, r"want \[2, 4\], got \[2, 3\]"),
        (".npz", {"rows": ROWS[:1]}, r"want \[2, 4\], got \[1, 4\]"),
        (".npz", {"rows": np.array([[0, 1, 2, 3], [0, 1, np.nan, 3]])}, "row 2: is not finite"),
        (".npz", {"ids": None, "keys": np.array([0.5, 1.0])}, "keys: want int64"),
        (".csv", {"d1": ["1", "one"]}, "column d1"),
        (".csv", {"d1": [1.0, None]}, "column d1, row 2: is empty"),
    ],
)
def test_wrong_content_is_refused_with_file_and_reason(
    tmp_path: Path, ending: str, changed: dict[str, object], message: str
) -> None:
    path = _write(tmp_path / f"rows{ending}", **changed)
    with pytest.raises(InvalidInput, match=message) as refused:
        read_rows(path, "item", 4, with_rows=True)
    assert str(path) in str(refused.value)


def test_ids_for_a_table_of_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="its keys are numbers"):
        read_rows(_write(tmp_path / "rows.npz"), "user_bucket", 4, with_rows=True)


@pytest.mark.parametrize("name", ["rows.npz", "rows.parquet", "rows.csv", "rows.safetensors", "rows.txt"])
def test_rubbish_is_refused_and_not_thrown_up(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00\xff rubbish")
    with pytest.raises(InvalidInput):
        read_rows(tmp_path / name, "item", 4, with_rows=True)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_rows(tmp_path / "none.npz", "item", 4, with_rows=True)
