"""Logging set up once per process: one line per record, constant message plus fields.

Refuses nothing; never logs vectors or user payloads (that is the caller's duty).
"""

from __future__ import annotations

import logging
import sys

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _ours(name: str) -> bool:
    """Ray adds fields of its own to the records of a process it has started; they begin with an underscore."""
    return name not in _STANDARD and not name.startswith("_")


class _FieldFormatter(logging.Formatter):
    """`time level logger: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = " ".join(f"{k}={v}" for k, v in record.__dict__.items() if _ours(k))
        return f"{line} {fields}" if fields else line


def configure_logging(level: str = "INFO") -> None:
    """Send this process's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FieldFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("kafka", "ray", "asyncio", "numba", "redis"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns of every 0.1 s in which a busy machine gave it no time; nobody can do anything with that.
    logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
