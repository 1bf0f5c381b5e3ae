from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from infra.deadline import Deadline
from infra.errors import RedisUnavailable
from infra.release import Item
from reranker.gateway.catalogue import UNKNOWN, Catalogue
from reranker.gateway.registry import ASK_AGAIN_S, MAX_REMEMBERED, Registry


class Store:
    """Knows some items; counts how often it is asked."""

    def __init__(self, *known: int) -> None:
        self.known = set(known)
        self.asked: list[list[int]] = []
        self.away = False

    async def items(self, keys: Sequence[int], deadline: Deadline) -> list[Item]:
        self.asked.append(list(keys))
        if self.away:
            raise RedisUnavailable("away")
        return [Item(f"i{key}", key, "", [], 0) for key in keys if key in self.known]


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def now_us(self) -> int:
        return int(self.now_s * 1e6)


class Case:
    def __init__(self, *known: int) -> None:
        self.store = Store(*known)
        self.clock = Clock()
        self.catalogue = Catalogue([Item("i1", 1, "", [], 1)])
        self.registry = Registry(self.store, self.catalogue, self.clock)

    def learn(self, *keys: int) -> bool:
        return asyncio.run(self.registry.learn(np.array(keys, np.int64), Deadline.after(60.0)))


def test_known_items_cost_no_call() -> None:
    case = Case()

    assert case.learn(1, 1) is False
    assert case.learn() is False
    assert case.store.asked == []


def test_an_item_is_learned_once_and_for_good() -> None:
    case = Case(2)

    assert case.learn(1, 2) is True
    assert case.learn(2) is False
    assert case.store.asked == [[2]]
    assert case.catalogue.rows(np.array([2], np.int64)).tolist() == [1]


def test_a_key_nobody_knows_is_asked_for_again_only_after_a_while() -> None:
    case = Case()

    case.learn(3)
    case.learn(3)
    assert case.store.asked == [[3]]

    case.clock.now_s += ASK_AGAIN_S
    case.store.known.add(3)
    assert case.learn(3) is True


def test_without_redis_keys_stay_unknown_and_nothing_is_raised() -> None:
    case = Case(4)
    case.store.away = True

    assert case.learn(4) is False
    assert case.catalogue.rows(np.array([4], np.int64)).tolist() == [UNKNOWN]


def test_what_is_remembered_of_strange_keys_is_bounded() -> None:
    case = Case()

    for first in range(1000, 1000 + 2 * MAX_REMEMBERED, 400):
        case.learn(*range(first, first + 400))

    assert len(case.registry._unknown_until_s) <= MAX_REMEMBERED + 400
