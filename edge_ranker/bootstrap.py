"""How sure a difference between two rankers on the same requests is: a paired bootstrap over users. Pure numpy.

Users are drawn with replacement, all requests of a user together, since one user's requests resemble each other (Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 8). Both rankers are measured on the same draws.
Refuses nothing; randomness comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_ranker.quality import NDCG_DEPTH

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

DRAWS = 1000
LEVEL = 0.95
MEASURES = ("auc", "gauc", "ndcg_at_10")


@dataclass(frozen=True, slots=True)
class Difference:
    """`ours` minus `theirs`, and the interval that holds the middle `LEVEL` of its draws."""

    ours: float
    theirs: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.low <= 0 <= self.high

    def as_dict(self) -> dict[str, float]:
        """For the report, rounded to 5 digits."""
        numbers = {"ours": self.ours, "theirs": self.theirs, "difference": self.ours - self.theirs}
        return {name: round(v, 5) for name, v in {**numbers, "low": self.low, "high": self.high}.items()}


@dataclass(frozen=True, slots=True)
class _ByUser:
    """Sums that any draw of users gives the measures from: wins of user u's positives over user v's negatives
    f64[U, U]; wins within requests and NDCG f64[U]; requests f64[U]; negatives of one request."""

    wins: F64
    own_wins: F64
    gain: F64
    requests: F64
    n_negatives: int


def paired_differences(
    ours: tuple[F32, F32], theirs: tuple[F32, F32], users: I64, rng: np.random.Generator, draws: int = DRAWS
) -> dict[str, Difference]:
    """The difference of each of `MEASURES` between two rankers' scores (positive f32[R], negative f32[R, n]) of
    requests by `users` i64[R]."""
    _, numbers = np.unique(users, return_inverse=True)
    n_users = int(numbers.max()) + 1
    drawn = rng.multinomial(n_users, np.full(n_users, 1 / n_users), size=draws).astype(np.float64)
    everybody = np.ones((1, n_users))
    some, other = (_by_user(*scores, numbers, n_users) for scores in (ours, theirs))
    edges = 100 * np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    found = {}
    for name in MEASURES:
        mine, yours = _measure(some, everybody)[name], _measure(other, everybody)[name]
        low, high = np.percentile(_measure(some, drawn)[name] - _measure(other, drawn)[name], edges)
        found[name] = Difference(float(mine[0]), float(yours[0]), float(low), float(high))
    return found


def _by_user(positive: F32, negative: F32, users: I64, n_users: int) -> _ByUser:
    wins = np.empty((n_users, n_users))
    for user in range(n_users):
        ordered = np.sort(negative[users == user], axis=None)
        below = np.searchsorted(ordered, positive, side="left")
        up_to = np.searchsorted(ordered, positive, side="right")
        wins[:, user] = np.bincount(users, (below + up_to) / 2, n_users)
    own = ((positive[:, None] > negative).sum(axis=1) + 0.5 * (positive[:, None] == negative).sum(axis=1)).astype(float)
    rank = (negative >= positive[:, None]).sum(axis=1)
    gain = np.where(rank < NDCG_DEPTH, 1 / np.log2(rank + 2.0), 0.0)
    return _ByUser(
        wins,
        np.asarray(np.bincount(users, own, n_users), np.float64),
        np.asarray(np.bincount(users, gain, n_users), np.float64),
        np.bincount(users, minlength=n_users).astype(np.float64),
        negative.shape[1],
    )


def _measure(sums: _ByUser, times: F64) -> dict[str, F64]:
    """Each measure f64[D] when user u counts `times` f64[D, U]."""
    requests = times @ sums.requests
    return {
        "auc": ((times @ sums.wins) * times).sum(axis=1) / (requests**2 * sums.n_negatives),
        "gauc": times @ sums.own_wins / (requests * sums.n_negatives),
        "ndcg_at_10": times @ sums.gain / requests,
    }
