"""What training reads: a log of interactions, and what is known of items and users.

Where it comes from, `feature_service.load` says. Refuses a log that no model can be
learnt from. Invariant: rows are sorted by user, then time; within one user every time is different, because what
happened in the same instant is set one microsecond apart in its order of appearance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_service.interactions import Interactions

I64 = NDArray[np.int64]

# Shown, not wanted: never part of a history, never something to learn as wanted.
NOT_WANTED = "impression"
MAX_CATEGORIES = 32
MAX_EVENT_NAMES = 64


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """What is known of one item before anybody has seen it."""

    title: str = ""
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Who and what a log speaks of, in the order of their row numbers; `events` are the names that occur."""

    name: str
    user_ids: list[str]
    item_ids: list[str]
    facts: list[ItemFacts]
    attributes: list[dict[str, str]]
    events: tuple[str, ...]
    fingerprint: str
    licence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Known):
    """Interactions i64[n] as row numbers into `user_ids` and `item_ids`, with times in microseconds since 1970.

    `first` i64[n_users + 1]: interactions of user u are rows first[u]..first[u + 1].
    """

    user: I64
    item: I64
    ts_us: I64
    first: I64

    @property
    def n_events(self) -> int:
        """Number of interactions."""
        return int(self.user.size)

    @property
    def interactions(self) -> Interactions:
        """The interactions alone."""
        return Interactions(self.user, self.item, self.ts_us, self.first)


def make_dataset(
    name: str,
    *,
    users: Sequence[str],
    items: Sequence[str],
    ts_us: I64,
    events: Sequence[str],
    facts: Mapping[str, ItemFacts],
    attributes: Mapping[str, Mapping[str, str]],
    fingerprint: str,
    licence: str = "",
) -> Dataset:
    """Index and sort interactions given in their order of appearance; items and users only described are kept too."""
    wanted = np.array([event != NOT_WANTED for event in events], np.bool_)
    user_ids, user = _indexed(users, attributes)
    item_ids, item = _indexed(items, facts)
    user, item, ts_us = user[wanted], item[wanted], np.asarray(ts_us, np.int64)[wanted]
    order = np.lexsort((ts_us, user))
    user, item, ts_us = user[order], item[order], ts_us[order]
    first = np.searchsorted(user, np.arange(len(user_ids) + 1)).astype(np.int64)
    return Dataset(
        name=name,
        user_ids=user_ids,
        item_ids=item_ids,
        facts=[facts.get(i, ItemFacts()) for i in item_ids],
        attributes=[dict(attributes.get(u, {})) for u in user_ids],
        user=user,
        item=item,
        ts_us=spread_ties(ts_us, first),
        first=first,
        events=tuple(sorted(set(events) - {NOT_WANTED})),
        fingerprint=fingerprint,
        licence=licence,
    )


def _indexed(ids: Sequence[str], described: Mapping[str, object]) -> tuple[list[str], I64]:
    """Distinct ids, those of the log first, and the row number of each of `ids`."""
    numbers: dict[str, int] = {}
    index = np.fromiter((numbers.setdefault(i, len(numbers)) for i in ids), np.int64, len(ids))
    for other in described:
        numbers.setdefault(other, len(numbers))
    return list(numbers), index


def spread_ties(ts_us: I64, first: I64) -> I64:
    """The smallest later times that differ within each user; `ts_us` is sorted within each user."""
    spread = ts_us.copy()
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        steps = np.arange(end - begin)
        spread[begin:end] = np.maximum.accumulate(spread[begin:end] - steps) + steps
    return spread
