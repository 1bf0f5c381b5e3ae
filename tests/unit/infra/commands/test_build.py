"""`trirank release build`: every target is looked up before any is built, and one failure does not stop the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.commands import build as command
from infra.commands.release import app
from infra.engine.run import EngineUnavailable
from infra.errors import InvalidInput
from infra.release import Release
from tests.tiny_release import write_tiny_release


def good(release: Release, target: str, folder: Path, builder: str | None) -> list[Path]:
    """Writes what it was asked for."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{target}.engine"
    file.write_text(f"{release.manifest.name} {builder}")
    return [file]


def bad(release: Release, target: str, folder: Path, builder: str | None) -> list[Path]:
    """Cannot build."""
    raise EngineUnavailable("no compiler here")


def never(release: Release, target: str, folder: Path, builder: str | None) -> list[Path]:
    """Must not be called."""
    raise AssertionError("it was built")


@pytest.fixture(autouse=True)
def _targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TARGETS", {"good": f"{__name__}:good", "bad": f"{__name__}:bad"})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", *arguments])


def test_engines_lie_beside_the_release(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "one")
    done = run(str(release.path), "--targets", "good", "--builder", "x")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "one.engines/good.engine").read_text() == "tiny x"
    assert "good.engine" in done.output


def test_a_builder_for_gpus_is_not_meant_for_the_cpu_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.TARGETS, "cpu", f"{__name__}:good")
    release = write_tiny_release(tmp_path / "one")
    assert run(str(release.path), "--targets", "good,cpu", "--builder", "x").exit_code == 0
    made = {file.name: file.read_text() for file in (tmp_path / "one.engines").iterdir()}
    assert made == {"good.engine": "tiny x", "cpu.engine": "tiny None"}
    # Alone it gets what it was given, and may refuse it.
    run(str(release.path), "--targets", "cpu", "--builder", "x")
    assert (tmp_path / "one.engines/cpu.engine").read_text() == "tiny x"


def test_one_failure_is_told_and_does_not_stop_the_others(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "one")
    done = run(str(release.path), "--targets", "bad, good", "--engines", str(tmp_path / "here"))
    assert done.exit_code == 2
    assert "bad: no compiler here" in done.output
    assert (tmp_path / "here/good.engine").is_file()


def test_a_folder_that_cannot_be_is_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.TARGETS, "good", f"{__name__}:never")
    release = write_tiny_release(tmp_path / "one")
    (tmp_path / "file").touch()
    done = run(str(release.path), "--targets", "good", "--engines", str(tmp_path / "file" / "engines"))
    assert isinstance(done.exception, NotADirectoryError)


@pytest.mark.parametrize("targets", ["good,gpu", ""])
def test_an_unknown_target_is_refused_before_anything_is_built(tmp_path: Path, targets: str) -> None:
    release = write_tiny_release(tmp_path / "one")
    done = run(str(release.path), "--targets", targets)
    assert isinstance(done.exception, InvalidInput)
    assert "targets" in str(done.exception)
    assert not (tmp_path / "one.engines").exists()
