"""`trirank train` refuses models, and places for rows, that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli import app
from infra.errors import TrirankError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reranker", "dien"], "reranker: 'dien' is unknown; give bst, din, or package.module:factory"),
        (["--reranker", "din", "--blocks", "2"], "blocks: only bst has it; leave it out with din"),
        (["--blocks", "0"], "blocks: 0 is out of range; give 1 to 8"),
        (["--readout", "max"], "readout: 'max' is unknown; give one of target, mean, concat"),
        (["--edge", "bst"], "edge: 'bst' is unknown; give mlp"),
        (["--staleness", "1"], "staleness: it means nothing without --rows-from-stack"),
        (["--rows-from-stack"], "home: no stack is running in"),
        (["--rows-from-stack", "--empty-tables"], "empty-tables: it trains nothing; leave --rows-from-stack out"),
    ],
)
def test_a_combination_that_means_nothing_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    out, home = tmp_path / "release", tmp_path / "home"
    arguments = ["train", "--data", "movielens-100k", "--out", str(out), "--home", str(home), *options]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, TrirankError), result.output
    assert said in str(result.exception)
    assert not out.exists()
