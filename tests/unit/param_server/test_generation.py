"""Tables of a release: their own keys only, with room, and nothing that is not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infra.errors import ReleaseRefused
from infra.release import Release, TableRows, write_release
from param_server.generation import Generation, Place, empty_generation, fill_from_release
from param_server.specs import table_specs

KEYS = np.arange(100, dtype=np.int64)


def a_release(folder: Path, *, row: float = 1.0, default: float = 0.5, default_dim: int = 2) -> Release:
    model = folder / "model"
    model.write_bytes(b"")
    rows = np.full((100, 2), row, np.float32)
    table = TableRows(KEYS, rows, np.ones(100, np.uint64), np.full(default_dim, default, np.float32))
    return write_release(
        folder / "release",
        name="r",
        parent=None,
        created_us=1,
        schema={},
        schema_fingerprint="abc",
        tables={"item": (4, table)},
        models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[],
        users=[],
        requests=[],
        report={},
        made_with={},
    )


def filled(release: Release, place: Place, headroom: float = 2.0) -> Generation:
    generation = empty_generation(release, place, headroom=headroom, min_capacity_rows=1)
    fill_from_release(generation, release, place)
    return generation


def test_the_shards_of_a_release_hold_every_key_once(tmp_path: Path) -> None:
    release = a_release(tmp_path)
    parts = [filled(release, Place(index, 3, 8)).tables["item"].export().keys for index in range(3)]
    assert all(part.size for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == KEYS.tolist()


def test_a_table_knows_its_id_and_default_row(tmp_path: Path) -> None:
    generation = filled(a_release(tmp_path), Place(0, 1, 8))
    assert generation.by_id[4] is generation.tables["item"]
    assert generation.tables["item"].lookup(np.array([1000]))[0].tolist() == [[0.5, 0.5]]


def test_capacity_is_rows_per_shard_times_headroom_but_not_less_than_asked(tmp_path: Path) -> None:
    release = a_release(tmp_path)
    assert table_specs(release, n_shards=2, headroom=3.0)["item"].capacity_rows == 150
    assert table_specs(release, min_capacity_rows=1000)["item"].capacity_rows == 1000


def test_a_release_with_a_row_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="not finite"):
        filled(a_release(tmp_path, row=float("nan")), Place(0, 1, 8))


@pytest.mark.parametrize("wrong", [{"default": float("inf")}, {"default_dim": 3}])
def test_a_default_row_that_does_not_fit_is_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(ReleaseRefused, match="default row"):
        table_specs(a_release(tmp_path, **wrong))  # type: ignore[arg-type]


def test_a_shard_whose_part_has_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="table_headroom"):
        filled(a_release(tmp_path), Place(0, 8, 8), headroom=0.1)
