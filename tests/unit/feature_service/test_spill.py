"""A log read in parts and spilled is the log in memory: numbers, times, cuts and counts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_service.dataset import Dataset, Known
from feature_service.folder import read_folder
from feature_service.parts import LogParts
from feature_service.spill import Spill, spill
from feature_service.timeline import cut, hold_out
from infra.errors import InvalidInput

EVENTS = ("click", "impression", "watch")


def _log(seed: int, n: int, n_users: int = 40, spread_s: int = 3000) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "user_id": [f"u{u}" for u in rng.integers(0, n_users, n)],
            "item_id": rng.integers(0, 30, n),
            "event": [EVENTS[e] for e in rng.choice(3, n, p=[0.7, 0.1, 0.2])],
            "ts": 1_700_000_000 + rng.integers(0, spread_s, n),
        }
    )


def _both(folder: Path, frame: pl.DataFrame, *, files: int = 3, part_rows: int = 50) -> tuple[Dataset, Spill]:
    """The log in memory, and the same log in several files, spilled."""
    whole, parts = folder / "whole" / "log", folder / "parts" / "log"
    for into in (whole, parts):
        into.mkdir(parents=True, exist_ok=True)
        for old in into.glob("*"):
            old.unlink()
        (into / "items.csv").write_text("item_id,title,categories\n7,Seven,a|b\nnew,Never seen,c\n")
        (into / "users.csv").write_text("user_id,country\nu3,NL\nnobody,DE\n")
    frame.write_parquet(whole / "interactions.parquet")
    rows = -(-frame.height // files)
    for number in range(files):
        piece = frame.slice(number * rows, rows)
        if piece.height:
            piece.write_parquet(parts / f"interactions-{number}.parquet")
    return read_folder(whole), spill(LogParts(parts, part_rows=part_rows), folder / "spill", users_per_shard=16)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), n=st.integers(300, 500), spread_s=st.sampled_from([5, 3000, 10**8]))
def test_a_spilled_log_is_the_log_in_memory(tmp_path: Path, seed: int, n: int, spread_s: int) -> None:
    data, spilled = _both(tmp_path, _log(seed, n, spread_s=spread_s))
    timeline = cut(data)
    fitted = hold_out(timeline)
    for name in Known.__dataclass_fields__:
        if name != "fingerprint":
            assert getattr(spilled.known, name) == getattr(data, name), name
    whole = spilled.shards.read(range(spilled.shards.n))
    for name in ("user", "item", "ts_us", "first"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(data, name))
    assert spilled.n_events == data.n_events
    assert spilled.test_from_us == timeline.test_from_us
    assert spilled.validation_from_us == fitted.test_from_us
    assert (spilled.first_us, spilled.last_us) == (data.ts_us.min(), data.ts_us.max())
    assert int(spilled.shard_events.sum()) == fitted.train.size
    for counted, where in ((spilled.fitted, fitted), (spilled.trained, timeline)):
        np.testing.assert_array_equal(counted.items, where.item_counts())
        np.testing.assert_array_equal(counted.users, where.trained_users())
    n_users = len(data.user_ids)
    np.testing.assert_array_equal(spilled.test_events, np.bincount(data.user[timeline.test], minlength=n_users))
    np.testing.assert_array_equal(spilled.validation_events, np.bincount(data.user[fitted.test], minlength=n_users))


def test_some_users_are_read_with_all_they_did(tmp_path: Path) -> None:
    data, spilled = _both(tmp_path, _log(0, 400))
    some = spilled.shards.of_users(np.array([33, 2, 17]))
    assert set(some.user.tolist()) == {2, 17, 33}
    for user in (2, 17, 33):
        of_user = slice(some.first[user], some.first[user + 1])
        np.testing.assert_array_equal(some.item[of_user], data.item[data.first[user] : data.first[user + 1]])


def test_what_is_read_for_training_ends_where_it_is_told(tmp_path: Path) -> None:
    _, spilled = _both(tmp_path, _log(0, 400))
    read = spilled.shards.read(range(spilled.shards.n), spilled.validation_from_us)
    assert read.ts_us.max() < spilled.validation_from_us
    assert read.item.size == spilled.shard_events.sum()


def test_one_file_has_the_fingerprint_of_the_folder_read_as_a_whole(tmp_path: Path) -> None:
    frame = _log(0, 300)
    frame.write_parquet(tmp_path / "interactions.parquet")
    log = LogParts(tmp_path)
    for _ in log.read():
        pass
    assert log.known("x").fingerprint == read_folder(tmp_path).fingerprint
    (tmp_path / "items.csv").write_text("item_id\n7\n")
    assert log.known("x").fingerprint == read_folder(tmp_path).fingerprint


@pytest.mark.parametrize(
    "ts",
    [
        pl.Series([1_700_000_000, 1_700_000_001]),
        pl.Series([1_700_000_000.25, 1_700_000_001.5]),
        pl.Series([1_700_000_000_123, 1_700_000_000_124]),
        pl.Series([1_700_000_000_123_456, 1_700_000_000_123_457], dtype=pl.UInt64),
        pl.Series([datetime(2024, 5, 1, 12, tzinfo=UTC), datetime(2024, 5, 2, 0, 0, 0, 5, tzinfo=UTC)]),
        pl.Series([datetime(2024, 5, 1, 12), datetime(2024, 5, 2, 0, 0, 0, 7000)], dtype=pl.Datetime("ms")),  # noqa: DTZ001
        pl.Series(["2024-05-01T12:00:00Z", "2024-05-01 14:00:00+02:00"]),
        pl.Series(["1700000000", "1700000001.5"]),
    ],
)
def test_times_mean_what_they_mean_in_a_whole_folder(tmp_path: Path, ts: pl.Series) -> None:
    frame = pl.DataFrame({"user_id": ["a", "b"], "item_id": [1, 2], "event": ["click"] * 2, "ts": ts})
    frame.write_parquet(tmp_path / "interactions.parquet")
    (part,) = LogParts(tmp_path).read()
    assert part.ts_us.tolist() == read_folder(tmp_path).ts_us.tolist()


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("user_id", ["a", None, "c"], "interactions-1.parquet: column user_id, row 2"),
        ("item_id", ["a", "b", ""], "interactions-1.parquet: column item_id, row 3: an id has 1 to 256 bytes"),
        ("item_id", ["a", "b", "x" * 257], "column item_id, row 3: an id has 1 to 256 bytes"),
        ("user_id", [1.0, 2.0, 3.0], "column user_id: an id is text or an integer, found Float64"),
        ("event", ["click", "", "click"], "column event, row 2: text is needed"),
        ("event", [1, 2, 3], "column event: text is needed, found Int64"),
        ("ts", [5, None, 7], "column ts, row 2: a time is needed, found nothing"),
        ("ts", [5, 6, -1], "column ts, row 3: is no time"),
        ("ts", [5, 6, 10**13], "column ts: rows 1 to 3 hold milliseconds, row 1 seconds"),
        ("ts", ["2024-05-01", "yesterday", "2024-05-02"], "column ts, row 2: 'yesterday' is no time"),
    ],
)
def test_a_bad_value_is_refused_by_file_column_and_row(
    tmp_path: Path, column: str, values: list[object], said: str
) -> None:
    good = {"user_id": ["a", "b", "c"], "item_id": ["a", "b", "c"], "event": ["click"] * 3, "ts": [5, 6, 7]}
    pl.DataFrame(good).write_parquet(tmp_path / "interactions-0.parquet")
    pl.DataFrame({**good, column: values}).write_parquet(tmp_path / "interactions-1.parquet")
    with pytest.raises(InvalidInput) as refused:
        list(LogParts(tmp_path, part_rows=10).read())
    assert said in str(refused.value)


def test_files_that_are_no_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a streamed log has to be in Parquet"):
        list(LogParts(tmp_path).read())
    (tmp_path / "interactions.parquet").write_bytes(b"not parquet")
    with pytest.raises(InvalidInput, match=r"interactions\.parquet: cannot be read as parquet"):
        list(LogParts(tmp_path).read())
    pl.DataFrame({"user_id": ["a"], "item_id": ["b"], "ts": [1]}).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(InvalidInput, match="column event is missing"):
        list(LogParts(tmp_path).read())
    pl.DataFrame({"user_id": ["a"], "item_id": ["b"], "ts": [1], "event": ["c"], "price": [2]}).write_parquet(
        tmp_path / "interactions.parquet"
    )
    with pytest.raises(InvalidInput, match="column price is unknown"):
        list(LogParts(tmp_path).read())


def test_a_log_too_short_or_of_impressions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="too little to train on"):
        _both(tmp_path, _log(0, 60))
    frame = _log(0, 300).with_columns(event=pl.lit("impression"))
    frame.write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(InvalidInput, match="no event but impressions"):
        spill(LogParts(tmp_path), tmp_path / "spill")
