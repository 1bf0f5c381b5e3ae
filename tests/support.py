"""Helpers for tests: waiting for a condition, free ports, servers that are ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from infra.ports import free_port

__all__ = ["Server", "eventually", "free_port", "ready"]

T = TypeVar("T")


class Server(Protocol):
    """A process that is started and stopped."""

    def start(self) -> None: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def stop(self) -> None: ...


S = TypeVar("S", bound=Server)


@contextmanager
def ready(server: S) -> Iterator[S]:
    """The server, answering, until the end of the block."""
    server.start()
    try:
        server.wait_ready(60.0)
        yield server
    finally:
        server.stop()


def eventually(probe: Callable[[], T], *, timeout_s: float = 30.0, every_s: float = 0.02) -> T:
    """Return the first truthy result of `probe`; fail when there is none within `timeout_s`."""
    pause = threading.Event()
    end = time.monotonic() + timeout_s
    while True:
        result = probe()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s; last result: {result!r}")
        pause.wait(every_s)
