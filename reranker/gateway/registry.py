"""Items that came after the release: looked up in Redis when somebody meets one, then kept in the catalogue.

Costs nothing for known items. A key that the registry does not know either is not asked for again for a while, so
that strange ids in requests do not turn into a Redis call each. Invariant: the memory for such keys is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.clock import Clock
from infra.deadline import Deadline
from infra.errors import TrirankError
from infra.release import Item
from reranker.gateway.catalogue import UNKNOWN, Catalogue

I64 = NDArray[np.int64]

ASK_AGAIN_S = 1.0
MAX_REMEMBERED = 10_000
MAX_ASKED = 500


class ItemStore(Protocol):
    """What this module needs of `feature_service.store.FeatureStore`."""

    async def items(self, keys: Sequence[int], deadline: Deadline) -> list[Item]: ...


class Registry:
    """Teaches the catalogue what the item registry knows."""

    def __init__(self, store: ItemStore, catalogue: Catalogue, clock: Clock) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._unknown_until_s: dict[int, float] = {}

    async def learn(self, keys: I64, deadline: Deadline) -> bool:
        """Ask the registry for the keys the catalogue lacks; whether it knew any. Without Redis they stay unknown for
        a while."""
        if not (asked := self._worth_asking(keys)):
            return False
        try:
            items = await self._store.items(asked, deadline)
        except TrirankError:
            items = []
        self._catalogue.learn(items)
        if len(self._unknown_until_s) > MAX_REMEMBERED:
            self._unknown_until_s.clear()
        again_s = self._clock.monotonic_s() + ASK_AGAIN_S
        for key in set(asked) - {item.key for item in items}:
            self._unknown_until_s[key] = again_s
        return bool(items)

    def _worth_asking(self, keys: I64) -> list[int]:
        rows = self._catalogue.rows(keys)
        if (rows != UNKNOWN).all():
            return []
        now_s = self._clock.monotonic_s()
        missing = keys[rows == UNKNOWN].tolist()
        return [key for key in missing if self._unknown_until_s.get(key, 0.0) <= now_s][:MAX_ASKED]
