"""Items a user has not touched, drawn as counter-examples.

Two kinds: uniform over the trained items, and in proportion to their training events, where popularity alone tells
nothing. Draws are independent, so one item can be drawn twice for one event. Invariant: a drawn item is never one of
the user's own in the log it was made for; where a user has left none, the draw is marked as void.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
BOOL = NDArray[np.bool_]

Kind = Literal["uniform", "popularity"]
KINDS: tuple[Kind, ...] = ("uniform", "popularity")
# After that many draws the few rows left (users who know nearly every item) are drawn from their own list.
_ROUNDS = 16


class Negatives:
    """Draws for one log: `counts` i64[n_items] are training events per item; `user` and `item` i64[n] what is known."""

    def __init__(self, counts: I64, user: I64, item: I64) -> None:
        self._n_items = counts.size
        self._items: I64 = np.flatnonzero(counts)
        self._cumulative: F64 = np.cumsum(counts[self._items], dtype=np.float64)
        self._known: I64 = np.unique(user * self._n_items + item)

    def draw(self, rng: np.random.Generator, users: I64, k: int, kind: Kind) -> tuple[I64, BOOL]:
        """k items for each of `users` [B]: items i64[B, k], and bool[B, k] that is false where a draw is void."""
        drawn = self._sample(rng, (users.size, k), kind)
        offsets = users[:, None] * self._n_items
        bad = self._is_known(offsets + drawn)
        for _ in range(_ROUNDS):
            n_bad = int(bad.sum())
            if n_bad == 0:
                break
            drawn[bad] = self._sample(rng, (n_bad,), kind)
            bad[bad] = self._is_known(np.broadcast_to(offsets, drawn.shape)[bad] + drawn[bad])
        valid = np.ones(drawn.shape, np.bool_)
        for row in np.flatnonzero(bad.any(axis=1)).tolist():
            left = self.untouched(int(users[row]))
            if left.size:
                drawn[row, bad[row]] = rng.choice(left, int(bad[row].sum()))
            else:
                valid[row] = False
        return drawn, valid

    def untouched(self, user: int) -> I64:
        """Trained items the user has not touched, i64[m]."""
        return self._items[~self._is_known(user * self._n_items + self._items)]

    def _sample(self, rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> I64:
        if kind == "uniform":
            return np.asarray(self._items[rng.integers(0, self._items.size, shape)])
        position = np.searchsorted(self._cumulative, rng.random(shape) * self._cumulative[-1], side="right")
        return np.asarray(self._items[np.minimum(position, self._items.size - 1)])

    def _is_known(self, pairs: I64) -> BOOL:
        position = np.minimum(np.searchsorted(self._known, pairs), self._known.size - 1)
        known: BOOL = self._known[position] == pairs
        return known
