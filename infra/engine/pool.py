"""A bounded number of lanes (context, stream, buffers) that requests in flight share.

Refuses, as overload, a request that finds no lane free in time, and every request after `close`. Invariant: a lane is
used by one request at a time, and comes back whatever happens to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from infra.errors import Overloaded, Permanent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """`in_flight` now, the `peak` of it, `taken` and `refused` since the start."""

    lanes: int
    in_flight: int
    peak: int
    taken: int
    refused: int


class Pool(Generic[T]):
    """Lanes that any thread may take."""

    def __init__(self, lanes: Sequence[T]) -> None:
        self._free = list(lanes)
        self._lanes = len(self._free)
        self._changed = threading.Condition()
        self._closed = False
        self._peak = self._taken = self._refused = 0

    @contextmanager
    def lane(self, wait_s: float) -> Iterator[T]:
        """A lane for the time of the block. Raises Overloaded when none is free within `wait_s` seconds, Permanent when
        the pool is closed."""
        lane = self._take(wait_s)
        try:
            yield lane
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify_all()

    def usage(self) -> Usage:
        """What the lanes are doing."""
        with self._changed:
            return Usage(self._lanes, self._lanes - len(self._free), self._peak, self._taken, self._refused)

    def close(self, wait_s: float) -> list[T]:
        """Refuse from now on; all lanes, once their requests are done. Raises Overloaded when one is still used after
        `wait_s` seconds: then nothing may be freed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(self._free) == self._lanes, wait_s):
                raise Overloaded(f"{self._lanes - len(self._free)} requests are still on the GPU after {wait_s:g} s")
            self._lanes = 0
            free, self._free = self._free, []
            return free

    def _take(self, wait_s: float) -> T:
        with self._changed:
            ready = self._changed.wait_for(lambda: bool(self._free) or self._closed, wait_s)
            if self._closed:
                raise Permanent("the engine is closed")
            if not ready:
                self._refused += 1
                raise Overloaded(f"all {self._lanes} lanes of the engine are taken")
            self._taken += 1
            lane = self._free.pop()
            self._peak = max(self._peak, self._lanes - len(self._free))
            return lane
