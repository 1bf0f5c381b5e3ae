"""Records that are missing between two that came: where a broker shows an offset before it has what lies before.

The embedded broker raises the end of a partition before it has stored the records, so with several producers a fetch at
the end may bring a later record without an earlier one, which is there a moment later. Pure: the time is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

# It stores a batch within milliseconds. What is not there after this long is taken for lost.
_LOST_AFTER_S = 5.0


class Holes:
    """The hole that each partition of one reader is at, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[int, tuple[int, float]] = {}

    def whole(self, partition: int, position: int, offsets: Sequence[int], now_s: float) -> tuple[int, bool]:
        """How many of the records at these `offsets` follow on from `position` without a hole; and whether the hole
        behind them has been there for so long that what it should hold is lost."""
        n = next((i for i, offset in enumerate(offsets) if offset > position + i), len(offsets))
        if n == len(offsets):
            self._since_s.pop(partition, None)
            return n, False
        at, since_s = self._since_s.get(partition, (-1, now_s))
        if at != position + n:
            at, since_s = position + n, now_s
        self._since_s[partition] = at, since_s
        return n, now_s - since_s > _LOST_AFTER_S
