"""Ray's texts go to a file; the stack's log has one line of each."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from infra.ray_texts import first_sentence, ray_texts_in

LONG = (
    "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker.\nLease ID: 0100 Worker ID: b66e98 Worker PID: 23131"
)


def test_a_long_text_is_kept_whole_and_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "ray.log"
    with caplog.at_level(logging.WARNING), ray_texts_in(path):
        print(LONG)
        print(LONG.replace("23131", "7"))
        print("(raylet) Another matter")
    print("ours")
    assert path.read_text().count("check the logs for the dead worker") == 2
    died = "Ray says: A worker died or was killed while executing a task by an unexpected system error"
    assert [(record.getMessage(), vars(record).get("pid")) for record in caplog.records] == [
        (died, "23131"),
        (died, "7"),
        ("Ray says: Another matter", None),
    ]
    assert vars(caplog.records[0])["more"] == str(path)
    assert capsys.readouterr().out == "ours\n"


@pytest.mark.parametrize("text", ["", "\n", "\x1b[0m \n"])
def test_nothing_is_said_of_nothing(text: str) -> None:
    assert first_sentence(text) == ""


def test_a_sentence_without_an_end_is_cut() -> None:
    assert first_sentence("x" * 500) == "x" * 117 + "..."
