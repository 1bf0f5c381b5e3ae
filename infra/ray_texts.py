"""What Ray prints into the stack's own process: long texts about workers that died, meant for whoever debugs Ray.

They go to a file; the log of the stack gets one line of each, with where the rest is. Nothing here imports Ray, and
nothing depends on what it says.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

logger = logging.getLogger(__name__)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\(\w+\)\s*")
_PID = re.compile(r"\bPID: (\d+)")
_MOST_CHARACTERS = 120


class RayTexts(io.TextIOBase):
    """Takes the place of stdout: everything is added to the file at `path`, the first sentence of each text logged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Keep the text; say that there is one, and of which process where it says so."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
        if sentence := first_sentence(text):
            pid = {"pid": found[1]} if (found := _PID.search(text)) else {}
            logger.warning("Ray says: %s", sentence, extra={**pid, "more": str(self._path)})
        return len(text)


def first_sentence(text: str) -> str:
    """The first sentence without colours and prefix, at most 120 characters; empty for nothing but space."""
    plain = _PREFIX.sub("", _COLOURS.sub("", text).strip())
    sentence = plain.split("\n", 1)[0].split(". ", 1)[0]
    return sentence if len(sentence) <= _MOST_CHARACTERS else sentence[: _MOST_CHARACTERS - 3] + "..."


@contextmanager
def ray_texts_in(path: Path) -> Iterator[None]:
    """While the block runs, what is printed to stdout goes to this file."""
    with redirect_stdout(RayTexts(path)):
        yield
