"""Where one table stands in the log, and which rows are ahead of that because they came from below. For one thread.

After a restart, or where a replica that is further writes to it, the cold tier may hold rows in a state that the log's
position has yet to reach. Such a row is complete up to its `order`; writes before that are in it already, and until the
position gets there it is what lies below. Invariant: a write is skipped iff it is in the row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from param_server.contract import I64, U64
from param_server.table import Bool, RowBatch

_AT_ONCE = 1024

Orders = Callable[[I64], U64]


class PlaceInLog:
    """Until `follow`, the order of a write is the number of its batch. `stranded`: rows that are ahead are below no
    more, so they are nowhere but here."""

    def __init__(self) -> None:
        self._orders: Orders | None = None
        self._sequence = 0
        self._ahead: dict[int, int] = {}
        self.stranded = False

    def __len__(self) -> int:
        """Keys that are, or may be, ahead."""
        return len(self._ahead)

    def follow(self, orders: Orders) -> None:
        """Take order from a log: `orders(keys)` u64[n] are the places up to which it is applied to those keys."""
        self._orders = orders

    def orders(self, keys: I64) -> U64:
        """Places up to which everything is applied to keys i64[n], the batch under way included: u64[n]."""
        return self._orders(keys) if self._orders is not None else np.full(keys.size, self._sequence, np.uint64)

    def up_to(self, keys: I64) -> list[int]:
        """The same for rows that are here: what came from below may be complete further than the log was read."""
        orders: list[int] = self.orders(keys).tolist()
        if not self._ahead:
            return orders
        return [max(order, self._ahead.get(key, 0)) for key, order in zip(keys.tolist(), orders, strict=True)]

    def ahead(self) -> I64:
        """Keys i64[n] whose rows came from below and are ahead now: nothing was written to them since."""
        keys = np.fromiter(self._ahead, np.int64, len(self._ahead))
        reached = np.fromiter(self._ahead.values(), np.uint64, len(self._ahead))
        return keys[reached > self.orders(keys)]

    def begin(self, batch: RowBatch) -> Bool | None:
        """A batch begins: which of its writes are in their rows already; None: none."""
        self._sequence += 1
        if not self._ahead:
            return None
        pairs = zip(batch.keys.tolist(), self.of_writes(batch), strict=True)
        return np.array([order < self._ahead.get(key, 0) for key, order in pairs], np.bool_)

    def of_writes(self, batch: RowBatch) -> list[int]:
        """The place of each write of the batch under way."""
        if self._orders is None:
            return [self._sequence - 1] * batch.keys.size
        if batch.order is not None:
            return [batch.order] * batch.keys.size
        places: list[int] = batch.versions.tolist()
        return places

    def arrived(self, key: int, order: int, now: int) -> None:
        """A row came from below that is complete up to `order`, when this table is at `now` for its key."""
        if order > now:
            self._ahead[key] = order

    def strand(self) -> None:
        """What lay below is gone."""
        self.stranded = bool(self._ahead)

    def let_pass(self) -> None:
        """Forget of some rows that they were ahead."""
        keys = list(islice(self._ahead, _AT_ONCE))
        for key, now in zip(keys, self.orders(np.array(keys, np.int64)).tolist(), strict=True):
            order = self._ahead.pop(key)
            self.arrived(key, order, now)
        self.stranded = self.stranded and bool(self._ahead)
