"""`trirank train` refuses combinations that mean nothing before it reads any data."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli import app
from infra.errors import TrirankError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefetch", "2"], "prefetch: it means nothing without --workers"),
        (["--buffer-events", "1000"], "buffer-events: it means nothing without --stream"),
        (["--workers", "-1"], "workers: -1 is too small; give 0 or more"),
        (["--amp", "fp8"], "amp: 'fp8' is unknown; give one of auto, on, off"),
        (["--accumulate", "0"], "accumulate: 0 is too small"),
        (["--sparse", "gap"], "sparse: 'gap' is no table with sparse gradients"),
        (["--checkpoint-s", "-1"], "checkpoint-s: -1 is no time between checkpoints"),
        (["--plots", "pyproject.toml"], "plots: pyproject.toml is a file; name a folder"),
        (["--compare", "tests"], "tests is no release directory"),
        (["--stream"], "stream: movielens-100k is no folder of interactions*.parquet"),
        (["--name", "a b/../c"], "name: 'a b/../c' cannot name a release"),
        (["--device", "tpu"], "device: 'tpu' is unknown; give one of cpu, cuda"),
    ],
)
def test_a_combination_that_means_nothing_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    out = tmp_path / "release"
    result = CliRunner().invoke(app, ["train", "--data", "movielens-100k", "--out", str(out), *options])
    assert isinstance(result.exception, TrirankError), result.output
    assert said in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_every_option_says_what_it_does() -> None:
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--resume", "--compare", "--plots", "--stream", "--amp", "--accumulate", "--patience", "--workers"):
        assert option in result.output
