"""A user's own files: read exactly, or refused by file, column and row."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import polars as pl
import pytest

from feature_service.dataset import ItemFacts
from feature_service.folder import read_folder
from infra.errors import InvalidInput

HEADER = "user_id,item_id,event,ts"


def _write(folder: Path, **files: str) -> Path:
    for stem, text in files.items():
        (folder / f"{stem}.csv").write_text(text)
    return folder


def _refusal(folder: Path) -> str:
    with pytest.raises(InvalidInput) as refused:
        read_folder(folder)
    return str(refused.value)


def test_three_csv_files_are_read(tmp_path: Path) -> None:
    data = read_folder(
        _write(
            tmp_path,
            interactions=f"{HEADER}\n7,a,click,100\n8,b,watch,50\n7,b,click,50\n",
            items='item_id,title,categories\na,"Tea, green",drink|hot\nc,,\n',
            users="user_id,country,age\n7,NL,\n9,DE,30-39\n",
        )
    )
    assert data.user_ids == ["7", "8", "9"]
    assert data.item_ids == ["a", "b", "c"]
    assert data.item.tolist() == [1, 0, 1]
    assert data.ts_us.tolist() == [50_000_000, 100_000_000, 50_000_000]
    assert data.events == ("click", "watch")
    assert data.facts == [ItemFacts("Tea, green", ("drink", "hot")), ItemFacts(), ItemFacts()]
    assert data.attributes == [{"country": "NL"}, {}, {"country": "DE", "age": "30-39"}]


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    pl.DataFrame({"user_id": [7, 8], "item_id": ["a", "b"], "event": ["click"] * 2, "ts": [5, 6]}).write_parquet(
        tmp_path / "interactions.parquet"
    )
    pl.DataFrame({"item_id": ["a"], "title": ["A"], "categories": [["k", "l"]]}).write_parquet(
        tmp_path / "items.parquet"
    )
    pl.DataFrame({"user_id": [7], "vip": [True], "age": [30]}).write_parquet(tmp_path / "users.parquet")
    data = read_folder(tmp_path)
    assert data.user_ids == ["7", "8"]
    assert data.ts_us.tolist() == [5_000_000, 6_000_000]
    assert data.facts[0] == ItemFacts("A", ("k", "l"))
    assert data.attributes[0] == {"vip": "true", "age": "30"}


@pytest.mark.parametrize(
    "ts",
    [
        "893286638",
        "893286638.0",
        "893286638000",
        "893286638000000",
        "1998-04-22T23:10:38Z",
        "1998-04-22 23:10:38",
        "1998-04-23T01:10:38+02:00",
    ],
)
def test_every_way_to_write_a_time_means_the_same(tmp_path: Path, ts: str) -> None:
    data = read_folder(_write(tmp_path, interactions=f"{HEADER}\n1,a,click,{ts}\n"))
    assert data.ts_us.tolist() == [893_286_638_000_000]


@pytest.mark.parametrize("ts", [datetime(1998, 4, 22, tzinfo=UTC), datetime(1998, 4, 22), date(1998, 4, 22)])  # noqa: DTZ001
def test_times_of_parquet_types_are_understood(tmp_path: Path, ts: date) -> None:
    frame = pl.DataFrame({"user_id": [1], "item_id": [2], "event": ["click"], "ts": [ts]})
    frame.write_parquet(tmp_path / "interactions.parquet")
    assert read_folder(tmp_path).ts_us.tolist() == [893_203_200_000_000]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "data: .* has neither interactions.parquet nor interactions.csv"),
        ({"interactions": ""}, "interactions.csv: the file is empty"),
        ({"interactions": HEADER + "\n"}, "interactions.csv: the file has no rows"),
        (
            {"interactions": "user,item_id,event,ts\n1,a,click,5\n"},
            "interactions.csv: column user_id is missing; the columns are user, item_id, event, ts",
        ),
        (
            {"interactions": HEADER + ",mood\n1,a,click,5,x\n"},
            "interactions.csv: column mood is unknown; allowed are user_id, item_id, event, ts",
        ),
        ({"interactions": HEADER + "\n1,a,click,5,9\n"}, "interactions.csv: cannot be read as csv"),
        (
            {"interactions": HEADER + "\n1,a,click,5\n1,a,click,soon\n"},
            r"interactions.csv: column ts, row 2 \(line 3\): 'soon' is no time",
        ),
        ({"interactions": HEADER + "\n1,a,click,-5\n"}, r"column ts, row 1 \(line 2\): '-5' is no time"),
        ({"interactions": HEADER + "\n1,a,click,nan\n"}, r"column ts, row 1 \(line 2\): 'nan' is no time"),
        ({"interactions": HEADER + "\n1,a,click,\n"}, r"column ts, row 1 \(line 2\): nothing is no time"),
        (
            {"interactions": HEADER + "\n1,a,click,1700000000\n1,a,click,1700000000000\n"},
            r"column ts, row 2 \(line 3\): '1700000000000' looks like milliseconds, row 1 like seconds",
        ),
        ({"interactions": HEADER + "\n,a,click,5\n"}, r"column user_id, row 1 \(line 2\): an id is text or an integer"),
        (
            {"interactions": HEADER + f"\n{'x' * 257},a,click,5\n"},
            r"column user_id, row 1 \(line 2\): an id has 1 to 256 bytes",
        ),
        ({"interactions": HEADER + "\n1,a,,5\n"}, r"column event, row 1 \(line 2\): text is needed, found nothing"),
        (
            {"interactions": HEADER + "\n1,a,click,5\n", "items": "item_id\na\nb\na\n"},
            r"items.csv: column item_id, row 3 \(line 4\): 'a' is described in row 1 already",
        ),
        (
            {"interactions": HEADER + "\n1,a,click,5\n", "items": "item_id,titel\na,b\n"},
            "items.csv: column titel is unknown; allowed are item_id, title, categories",
        ),
        (
            {
                "interactions": HEADER + "\n1,a,click,5\n",
                "items": "item_id,categories\na," + "|".join(map(str, range(33))) + "\n",
            },
            r"items.csv: column categories, row 1 \(line 2\): 33 categories; at most 32",
        ),
        (
            {"interactions": HEADER + "\n1,a,click,5\n", "users": "user_id,sex\n1,F\n1,M\n"},
            r"users.csv: column user_id, row 2 \(line 3\): '1' is described in row 1 already",
        ),
        (
            {"interactions": HEADER + "\n" + "".join(f"1,a,e{n},5\n" for n in range(65))},
            "interactions.csv: column event: more than 64 different names",
        ),
    ],
)
def test_wrong_input_is_refused_by_file_column_and_row(tmp_path: Path, files: dict[str, str], message: str) -> None:
    import re

    assert re.search(message, _refusal(_write(tmp_path, **files)))


def test_wrong_types_in_parquet_are_refused_by_row(tmp_path: Path) -> None:
    good = {"user_id": ["1"], "item_id": ["a"], "event": ["click"], "ts": [5]}
    for column, value, message in (
        ("user_id", 1.5, "column user_id, row 1: an id is text or an integer, found 1.5"),
        ("item_id", None, "column item_id, row 1: an id is text or an integer, found nothing"),
        ("event", 3, "column event, row 1: text is needed, found 3"),
        ("ts", True, "column ts, row 1: True is no time"),
    ):
        pl.DataFrame({**good, column: [value]}).write_parquet(tmp_path / "interactions.parquet")
        assert message in _refusal(tmp_path)
    pl.DataFrame(good).write_parquet(tmp_path / "interactions.parquet")
    pl.DataFrame({"user_id": ["1"], "height": [1.82]}).write_parquet(tmp_path / "users.parquet")
    assert "users.parquet: column height, row 1: an attribute is text or an integer" in _refusal(tmp_path)


def test_two_files_for_one_thing_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "interactions.parquet").write_bytes(b"no parquet")
    assert "interactions.parquet: cannot be read as parquet" in _refusal(tmp_path)
    _write(tmp_path, interactions=f"{HEADER}\n1,a,click,5\n")
    assert "there is a interactions.parquet too" in _refusal(tmp_path)


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    first = read_folder(_write(tmp_path, interactions=f"{HEADER}\n1,a,click,5\n")).fingerprint
    assert read_folder(tmp_path).fingerprint == first
    assert read_folder(_write(tmp_path, interactions=f"{HEADER}\n1,a,click,6\n")).fingerprint != first
