"""Metric values kept in memory and written to this process's file a few times a second.

prometheus_client writes every step into a mapped file, which costs several times what counting does. A process that is
killed takes the steps of the last `WRITE_EVERY_S` with it. Nothing runs while nothing is counted.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

WRITE_EVERY_S = 0.25


class Value(Protocol):
    """What prometheus_client asks of a value."""

    def inc(self, amount: float) -> None: ...
    def set(self, value: float, timestamp: float | None = None) -> None: ...
    def get(self) -> float: ...


_lock = threading.Lock()
_changed: list[Any] = []
_wake = threading.Event()
_writer: list[threading.Thread] = []


def buffered(written: Callable[..., Value]) -> type[Any]:
    """A value class over `written`, prometheus_client's class of values in mapped files."""

    class BufferedValue:
        _multiprocess = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._written: Value = written(*args, **kwargs)
            self._step = 0.0

        def inc(self, amount: float) -> None:
            with _lock:
                if not self._step:
                    _note(self)
                self._step += amount

        def set(self, value: float, timestamp: float | None = None) -> None:
            with _lock:
                self._step = 0.0
                self._written.set(value, timestamp)

        def get(self) -> float:
            with _lock:
                return self._written.get() + self._step

        def set_exemplar(self, exemplar: object) -> None:
            """Files have no place for exemplars."""

        def get_exemplar(self) -> None:
            return None

        def write(self) -> None:
            self._written.inc(self._step)
            self._step = 0.0

    return BufferedValue


def write_all() -> None:
    """Write what has changed now."""
    with _lock:
        for value in _changed:
            value.write()
        _changed.clear()


def _note(value: Any) -> None:
    if not _writer:
        _writer.append(threading.Thread(target=_write_for_ever, name="metrics-writer", daemon=True))
        _writer[0].start()
        atexit.register(write_all)
    if not _changed:
        _wake.set()
    _changed.append(value)


def _write_for_ever() -> None:
    while True:
        _wake.wait()
        _wake.clear()
        time.sleep(WRITE_EVERY_S)
        write_all()
