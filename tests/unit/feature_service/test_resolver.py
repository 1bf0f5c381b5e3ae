"""Requests become keys; what is missing is missing openly."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_service.hashing import ATTRIBUTE, USER, bucket_of, key_of
from feature_service.resolver import ResolvedUser, Resolver, resolve_user
from feature_service.schema import FeatureSchema
from feature_service.store import NOBODY, History, UserState
from infra.deadline import Deadline
from infra.errors import RedisUnavailable

SCHEMA = FeatureSchema(n_user_buckets=100)
NAMES = ("age", "sex")
STORED = UserState(History(np.array([3, 1]), np.array([10, 20])), {"sex": "F", "age": "25"})


class Stored:
    """A store with one answer, or none."""

    def __init__(self, state: UserState | None) -> None:
        self.state = state
        self.asked: list[int] = []

    async def read(self, user_key: int, deadline: Deadline) -> UserState:
        self.asked.append(user_key)
        if self.state is None:
            raise RedisUnavailable("redis: away")
        return self.state


def resolve(store: Stored, user_id: str | None, context: dict[str, object] | None = None) -> ResolvedUser:
    resolver = Resolver(store, SCHEMA, NAMES)
    return asyncio.run(resolver.resolve(user_id, context or {}, Deadline.after(60)))


def attributes(*pairs: str) -> set[int]:
    return {key_of(ATTRIBUTE, pair) for pair in pairs}


def test_a_user_has_his_key_his_bucket_his_history_and_his_attributes() -> None:
    user = resolve(Stored(STORED), "196")
    assert user.user_key == key_of(USER, "196")
    assert user.bucket == bucket_of("196", 100)
    assert user.history_keys.tolist() == [3, 1]
    assert user.history_ts_us.tolist() == [10, 20]
    assert set(user.attribute_keys.tolist()) == attributes("sex=F", "age=25")
    assert not user.degraded


def test_context_overrides_a_stored_attribute_and_anything_the_schema_does_not_know_is_ignored() -> None:
    context = {"age": 30, "mood": "good", "sex": ["F"], "flag": True}
    user = resolve(Stored(STORED), "196", context)
    assert set(user.attribute_keys.tolist()) == attributes("sex=F", "age=30")


def test_an_attribute_of_the_context_counts_for_users_without_stored_ones() -> None:
    assert set(resolve(Stored(NOBODY), "new", {"sex": "M"}).attribute_keys.tolist()) == attributes("sex=M")


def test_somebody_anonymous_has_neither_key_nor_bucket_and_costs_no_round_trip() -> None:
    store = Stored(STORED)
    user = resolve(store, None, {"sex": "M"})
    assert user.user_key is None
    assert user.bucket is None
    assert user.history_keys.size == 0
    assert set(user.attribute_keys.tolist()) == attributes("sex=M")
    assert not user.degraded
    assert store.asked == []


def test_without_redis_the_user_keeps_key_and_bucket_and_the_answer_says_degraded() -> None:
    user = resolve(Stored(None), "196", {"age": "30"})
    assert user.degraded
    assert user.user_key == key_of(USER, "196")
    assert user.bucket == bucket_of("196", 100)
    assert user.history_keys.size == 0
    assert set(user.attribute_keys.tolist()) == attributes("age=30")


@given(st.text(min_size=1, max_size=64), st.integers(1, 10_000))
def test_every_user_has_a_bucket_of_the_schema(user_id: str, n_buckets: int) -> None:
    user = resolve_user(FeatureSchema(n_user_buckets=n_buckets), user_id, NOBODY, {}, ())
    assert user.bucket is not None
    assert 0 <= user.bucket < n_buckets
    assert user.attribute_keys.dtype == np.int64


@given(st.dictionaries(st.sampled_from(["age", "sex", "x"]), st.one_of(st.text(), st.integers(), st.none())))
def test_the_order_of_the_context_does_not_matter(context: dict[str, object]) -> None:
    backwards = dict(reversed(context.items()))
    one, other = (resolve_user(SCHEMA, "u", STORED, given_, NAMES) for given_ in (context, backwards))
    assert one.attribute_keys.tolist() == other.attribute_keys.tolist()
