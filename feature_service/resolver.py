"""A raw request becomes keys, a bucket and a history; a stage that may fail without failing the request.

Whether a user is known, stands in a bucket or is anonymous follows from what is found for these keys later. Refuses
to guess: context that the schema has no attribute for is ignored. Invariant: without Redis the answer is the same as
for a user with no history and no stored attributes, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_service import metrics
from feature_service.hashing import ATTRIBUTE, USER, bucket_of, key_of, keys_of
from feature_service.schema import FeatureSchema
from feature_service.store import NOBODY, UserState
from infra.deadline import Deadline
from infra.errors import RedisUnavailable

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ResolvedUser:
    """Keys to fetch for one user, history oldest first: i64[L] keys and times in microseconds.

    `user_key` and `bucket` are None for somebody anonymous: the default row of `user_bucket` stands in for him.
    `degraded`: Redis was away or late, so history and stored attributes are missing.
    """

    user_key: int | None
    bucket: int | None
    attribute_keys: I64
    history_keys: I64
    history_ts_us: I64
    degraded: bool


class UserStates(Protocol):
    """What this module needs of `feature_service.store.FeatureStore`."""

    async def read(self, user_key: int, deadline: Deadline) -> UserState:
        """History and attributes; raises RedisUnavailable."""
        ...


class Resolver:
    """Resolves users by one release's schema. `attribute_names` are the attributes its `user_attribute` table knows."""

    def __init__(self, store: UserStates, schema: FeatureSchema, attribute_names: Collection[str] = ()) -> None:
        self._store = store
        self._schema = schema
        self._attribute_names = frozenset(attribute_names)

    async def resolve(self, user_id: str | None, context: Mapping[str, Any], deadline: Deadline) -> ResolvedUser:
        """Keys, bucket and history of one request; one Redis round trip, none for somebody anonymous."""
        if user_id is None:
            return resolve_user(self._schema, None, NOBODY, context, self._attribute_names)
        try:
            state, degraded = await self._store.read(key_of(USER, user_id), deadline), False
        except RedisUnavailable:
            metrics.HISTORY_READS.labels("missing").inc()
            state, degraded = NOBODY, True
        else:
            metrics.HISTORY_READS.labels("found" if state.history.keys.size else "empty").inc()
        return resolve_user(self._schema, user_id, state, context, self._attribute_names, degraded=degraded)


def resolve_user(
    schema: FeatureSchema,
    user_id: str | None,
    state: UserState,
    context: Mapping[str, Any],
    attribute_names: Collection[str],
    *,
    degraded: bool = False,
) -> ResolvedUser:
    """Pure part: what is stored of a user, plus what the request itself says, as keys.

    Context names in `attribute_names` whose value is a string or an integer override the stored attribute.
    """
    given = {
        name: str(value)
        for name, value in context.items()
        if name in attribute_names and isinstance(value, str | int) and not isinstance(value, bool)
    }
    attributes = {**state.attributes, **given}
    return ResolvedUser(
        user_key=None if user_id is None else key_of(USER, user_id),
        bucket=None if user_id is None else bucket_of(user_id, schema.n_user_buckets),
        attribute_keys=keys_of(ATTRIBUTE, (f"{name}={value}" for name, value in sorted(attributes.items()))),
        history_keys=state.history.keys,
        history_ts_us=state.history.ts_us,
        degraded=degraded,
    )
