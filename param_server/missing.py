"""What is known of keys that no table of the shard holds: asked for, being read, surely not there, or waiting.

A write that needs the stored row (an add; a write that may be older) waits here, and every later write to its key
behind it, until the row was read. Invariant: a read counts only if nothing was written to its key since it was sent.
For one thread.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from param_server.contract import I64
from param_server.rowstate import Write

_MOST_WANTED = 16384
_MOST_ABSENT = 65536


class Missing:
    """Times are seconds that never go back."""

    def __init__(self) -> None:
        self._absent: dict[int, tuple[float, bool]] = {}
        self._wanted: dict[int, None] = {}
        self._awaited: dict[int, int] = {}
        self._waiting: dict[int, list[Write]] = {}
        self._number = 0
        self.n_waiting = 0

    @property
    def n_asked(self) -> int:
        """Keys to be read or being read."""
        return len(self._wanted) + len(self._awaited)

    @property
    def anything(self) -> bool:
        """Whether anything is known of any key."""
        return bool(self._absent or self._wanted or self._awaited)

    @property
    def n_absent(self) -> int:
        """Keys remembered as not there."""
        return len(self._absent)

    def unknown(self, key: int, now_s: float) -> bool:
        """Whether a read of the key would tell something new."""
        known = self._absent.get(key)
        if known is not None:
            if known[0] > now_s:
                return False
            del self._absent[key]
        return key not in self._wanted and key not in self._awaited

    def surely_absent(self, key: int, now_s: float) -> bool:
        """Whether the cold tier said a moment ago that it never saw the key."""
        known = self._absent.get(key)
        return known is not None and known[1] and known[0] > now_s

    def remember_absent(self, key: int, until_s: float, *, sure: bool) -> None:
        """Do not read the key again until then; the oldest memory goes when there are too many."""
        self._absent.pop(key, None)
        if len(self._absent) >= _MOST_ABSENT:
            del self._absent[next(iter(self._absent))]
        self._absent[key] = (until_s, sure)

    def ask(self, key: int) -> bool:
        """Have the key read; False when too many are asked for already."""
        if len(self._wanted) >= _MOST_WANTED:
            return False
        self._wanted[key] = None
        return True

    def wait(self, key: int, write: Write) -> None:
        """Keep a write until the key was read."""
        self._absent.pop(key, None)
        if key not in self._waiting:
            self._waiting[key] = []
            if key not in self._awaited:
                self._wanted[key] = None
        self._waiting[key].append(write)
        self.n_waiting += 1

    def waits(self, key: int) -> bool:
        """Whether writes to the key wait."""
        return key in self._waiting

    def forget(self, keys: list[int]) -> None:
        """The keys were written to: what is known or being read of them is out of date. Who waits goes on waiting."""
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)
        if self._wanted or self._awaited:
            for key in keys:
                if key not in self._waiting:
                    self._wanted.pop(key, None)
                    self._awaited.pop(key, None)

    def next_read(self, most: int) -> tuple[int, I64] | None:
        """The next keys to read, those that writes wait for first, and the number of the read."""
        if not self._wanted:
            return None
        urgent = (key for key in self._waiting if key in self._wanted)
        keys = list(islice(urgent, most))
        if len(keys) < most:
            chosen = set(keys)
            keys += islice((key for key in self._wanted if key not in chosen), most - len(keys))
        self._number += 1
        for key in keys:
            del self._wanted[key]
            self._awaited[key] = self._number
        return self._number, np.array(keys, np.int64)

    def arrived(self, number: int, key: int) -> bool:
        """Whether what that read says of the key still counts; it is no longer awaited."""
        if self._awaited.get(key) != number:
            return False
        del self._awaited[key]
        return True

    def take_waiting(self, key: int) -> list[Write] | None:
        """The writes that waited for the key, in order."""
        writes = self._waiting.pop(key, None)
        if writes is not None:
            self.n_waiting -= len(writes)
        return writes

    def ask_again(self, key: int) -> None:
        """The read failed and writes wait: read once more."""
        self._wanted[key] = None
