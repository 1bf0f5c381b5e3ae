"""Clients that ask all the time while a test or a measurement goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def clients(stopping: threading.Event, asking: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Each of `asking` in a thread of its own until the block ends, when `stopping` tells them to return.

    What one of them raised is raised at the end.
    """
    all_asking = list(asking)
    with ThreadPoolExecutor(len(all_asking), "client") as pool:
        running = [pool.submit(ask) for ask in all_asking]
        try:
            yield
        finally:
            stopping.set()
            for client in running:
                client.result()
