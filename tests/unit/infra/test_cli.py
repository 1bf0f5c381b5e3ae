"""The command line says what went wrong in one line, and never hides a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of a command."""
    monkeypatch.setattr("sys.argv", ["trirank", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "release"

    assert run(monkeypatch, "train", "--data", str(tmp_path), "--out", str(out)) == 1

    assert capsys.readouterr().err.strip() == f"trirank: {out.with_name('.release.draft')}: Not a directory"


def test_a_failure_without_a_file_shows_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise OSError("a bug")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(OSError, match="a bug"):
        cli.main()
