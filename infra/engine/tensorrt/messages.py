"""What TensorRT says while it works: kept, so that a refusal has its reason. Invariant: nothing is printed."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.engine.tensorrt.api import TensorRT

logger = logging.getLogger(__name__)

_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.DEBUG}


def listener(trt: TensorRT) -> Any:
    """An ILogger whose `errors` are the errors told so far, newest last; warnings go to the log of this process at
    DEBUG, because a builder warns of what it does by design."""

    class Listener(trt.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = _LEVELS.get(severity.name, 0)
            if level >= logging.ERROR:
                self.errors.append(message)
            elif level:
                logger.log(level, message)

    return Listener()


def last_error(listener: Any) -> str:
    """The newest error in one line, or that there was none."""
    return " ".join(listener.errors[-1].split()) if listener.errors else "no reason was given"


@contextmanager
def nothing_printed() -> Iterator[None]:
    """The compiler inside the builder writes some warnings to standard output, past every logger; a command's output
    has to stay its own. They go to the log at DEBUG. For builds alone: it concerns the whole process."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            printed.seek(0)
            for line in printed.read().decode(errors="replace").splitlines():
                logger.debug(line)
