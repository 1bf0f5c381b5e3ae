"""Histories, attributes and later items in Redis: read in one round trip, written exactly once per Kafka record.

    <stack>:h:<user key, hex>   sorted set of events; member `ts_us, item key, event` (">qqB"), score ts_us
    <stack>:a:<user key, hex>   JSON object of the user's attributes, as the release knows them
    <stack>:items               hash, item key in hex -> JSON of an item that came after the release
    <stack>:feedback            hash: partition -> next offset, `identity` of that log, `count:<event>`

Refuses more than the schema's newest `max_history` events per user. Invariant: an event and the position after it are
written in one transaction, so a record counts once however often its reader is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import hiredis
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from feature_service.hashing import ITEM, USER, key_of
from feature_service.schema import FeatureSchema
from infra.deadline import Deadline
from infra.errors import RedisUnavailable
from infra.redis import connect, redis_errors
from infra.redis_line import RedisLine
from infra.release import Item, User

I64 = NDArray[np.int64]
T = TypeVar("T")

_MEMBER = np.dtype([("ts_us", ">i8"), ("item", ">i8"), ("event", "u1")])
_SEEDED = "seed"
_CHUNK = 500
_IDENTITY = b"identity"
_COUNT = "count:"


@dataclass(frozen=True, slots=True)
class History:
    """Newest events of one user, oldest first: item keys i64[n], times i64[n] in microseconds."""

    keys: I64
    ts_us: I64


@dataclass(frozen=True, slots=True)
class UserState:
    """What is stored of one user; both empty for a user nobody has seen."""

    history: History
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One event that enters a history."""

    user_key: int
    item_key: int
    event: str
    ts_us: int


EMPTY_HISTORY = History(np.empty(0, np.int64), np.empty(0, np.int64))
NOBODY = UserState(EMPTY_HISTORY, {})


class FeatureStore:
    """Reads for the request path. For one event loop."""

    def __init__(self, redis_url: str, stack: str, schema: FeatureSchema) -> None:
        self._line = RedisLine(redis_url)
        self._keys = _Keys(stack)
        self._newest = schema.max_history - 1

    async def read(self, user_key: int, deadline: Deadline) -> UserState:
        """History and attributes in one round trip. Raises RedisUnavailable when Redis is away or late."""
        history = _pack(("ZREVRANGE", self._keys.history(user_key), 0, self._newest))
        attributes = _pack(("GET", self._keys.attributes(user_key)))
        members, raw = await self._line.ask(history + attributes, 2, deadline)
        try:
            return UserState(_history(members), _attributes(raw))
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise _damaged(error) from error

    async def items(self, keys: Sequence[int], deadline: Deadline) -> list[Item]:
        """Those of the items that came after the release, in one round trip. Raises RedisUnavailable."""
        if not keys:
            return []
        asked = _pack(("HMGET", self._keys.items, *(_hex(key) for key in keys)))
        [found] = await self._line.ask(asked, 1, deadline)
        try:
            return [msgspec.json.decode(raw, type=Item) for raw in found if raw is not None]
        except msgspec.MsgspecError as error:
            raise _damaged(error) from error

    async def ping(self, deadline: Deadline) -> None:
        """Raises RedisUnavailable when Redis does not answer."""
        await self._line.ask(_pack(("PING",)), 1, deadline)

    async def close(self) -> None:
        """Close the connection."""
        await self._line.close()


class HistoryWriter:
    """Writes of the one process that reads the feedback topic. For one thread."""

    def __init__(self, redis_url: str, stack: str, schema: FeatureSchema) -> None:
        # No retry of its own: a transaction whose answer was lost may have been done.
        self._redis = connect(redis_url)
        self._keys = _Keys(stack)
        self._max_history = schema.max_history

    def positions(self) -> tuple[dict[int, int], str | None]:
        """Next offset per partition, and the identity of the log they belong to. Raises RedisUnavailable."""
        with redis_errors():
            stored: Any = self._redis.hgetall(self._keys.feedback)
        identity = stored.get(_IDENTITY)
        positions = {int(field): int(offset) for field, offset in stored.items() if field.isdigit()}
        return positions, None if identity is None else identity.decode()

    def apply(
        self,
        events: Sequence[HistoryEvent],
        positions: Mapping[int, int],
        identity: str,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Add events to histories and move the positions, in one transaction. Raises RedisUnavailable: read
        `positions()` again before going on, for the transaction may have been done."""
        members: dict[int, dict[bytes, int]] = {}
        for event in events:
            members.setdefault(event.user_key, {})[_member(event.ts_us, event.item_key, event.event)] = event.ts_us
        with redis_errors(), self._redis.pipeline(transaction=True) as pipeline:
            for user_key, added in members.items():
                self._add(pipeline, user_key, added)
            for event_name, n in (counts or {}).items():
                pipeline.hincrby(self._keys.feedback, _COUNT + event_name, n)
            fields: dict[Any, Any] = {_IDENTITY: identity, **{str(p): offset for p, offset in positions.items()}}
            pipeline.hset(self._keys.feedback, mapping=fields)
            pipeline.execute()

    def counts(self) -> dict[str, int]:
        """Events applied so far, by type. Raises RedisUnavailable."""
        with redis_errors():
            stored: Any = self._redis.hgetall(self._keys.feedback)
        return {f.decode()[len(_COUNT) :]: int(n) for f, n in stored.items() if f.startswith(_COUNT.encode())}

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _add(self, pipeline: Any, user_key: int, members: Mapping[bytes, int]) -> None:
        key = self._keys.history(user_key)
        pipeline.zadd(key, members)
        pipeline.zremrangebyrank(key, 0, -self._max_history - 1)

    def seed(self, users: Iterable[User]) -> int:
        """Store attributes of a release's users, and histories where Redis has none or only older ones; how many
        histories were written. Doing it again changes nothing. Raises RedisUnavailable."""
        written = 0
        for chunk in _chunks(users, _CHUNK):
            with redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
                keys = [key_of(USER, user.user_id) for user in chunk]
                for key in keys:
                    pipeline.zrevrange(self._keys.history(key), 0, 0, withscores=True)
                newest: list[Any] = pipeline.execute()
                for user, key, stored in zip(chunk, keys, newest, strict=True):
                    if user.attributes:
                        pipeline.set(self._keys.attributes(key), msgspec.json.encode(user.attributes))
                    if user.history_ts_us and (not stored or stored[0][1] < max(user.history_ts_us)):
                        self._add(pipeline, key, _seed_members(user, self._max_history))
                        written += 1
                pipeline.execute()
        return written


def register_items(redis_url: str, stack: str, items: Iterable[Item]) -> None:
    """Tell gateways of items that came after the release. Raises RedisUnavailable."""
    mapping = {_hex(item.key): msgspec.json.encode(item) for item in items}
    if mapping:
        with redis_errors(), connect(redis_url) as client:
            client.hset(_Keys(stack).items, mapping=mapping)


class _Keys:
    """Redis keys of one stack."""

    def __init__(self, stack: str) -> None:
        self._stack = stack
        self.items = f"{stack}:items"
        self.feedback = f"{stack}:feedback"

    def history(self, user_key: int) -> str:
        return f"{self._stack}:h:{_hex(user_key)}"

    def attributes(self, user_key: int) -> str:
        return f"{self._stack}:a:{_hex(user_key)}"


def _damaged(error: Exception) -> RedisUnavailable:
    return RedisUnavailable(f"redis: stored content is damaged: {error}")


def _pack(command: tuple[str | int, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub wants tuples of one
    return packed


def _hex(key: int) -> str:
    return f"{key & 0xFFFFFFFFFFFFFFFF:016x}"


def _member(ts_us: int, item_key: int, event: str) -> bytes:
    # The event is part of the identity only, so a byte of its hash is enough and needs no list of events.
    code = xxhash.xxh32_intdigest(event.encode()) & 0xFF
    return ts_us.to_bytes(8, "big", signed=True) + item_key.to_bytes(8, "big", signed=True) + bytes((code,))


def _seed_members(user: User, newest: int) -> dict[bytes, int]:
    events = zip(user.history_items[-newest:], user.history_ts_us[-newest:], strict=True)
    return {_member(ts_us, key_of(ITEM, item), _SEEDED): ts_us for item, ts_us in events}


def _history(newest_first: Sequence[bytes]) -> History:
    if not newest_first:
        return EMPTY_HISTORY
    members = np.frombuffer(b"".join(reversed(newest_first)), _MEMBER)
    return History(members["item"].astype(np.int64), members["ts_us"].astype(np.int64))


def _attributes(raw: bytes | None) -> dict[str, str]:
    return {} if raw is None else msgspec.json.decode(raw, type=dict[str, str])


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
