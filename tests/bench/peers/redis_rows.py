"""Rows and histories in Redis, as the peers keep them, and the Redis they are in.

    i:<key, 8 bytes>   candidate token of an item, f32 bytes    (monolith)
    u:<user id>        vector of a user, f32 bytes, then one byte: 1 when he has a row of his own    (monolith)
    h:<user id>        list of `<qq` (item key, ts_us), oldest first    (both)

Vectors and histories are packed: one GET is one row, and one MGET is all candidates.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import redis
from numpy.typing import NDArray

from tests.bench.peers.features import PeerFeatures

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
_BATCH = 1000
_EVENT = np.dtype([("key", "<i8"), ("ts_us", "<i8")])


def item_key(key: int) -> bytes:
    """Redis key of an item's token."""
    return b"i:" + struct.pack("<q", key)


def user_key(user_id: str) -> str:
    """Redis key of a user's vector."""
    return f"u:{user_id}"


def history_key(user_id: str) -> str:
    """Redis key of a user's history."""
    return f"h:{user_id}"


def read_user(packed: bytes) -> tuple[F32, bool]:
    """Vector f32[user_dim] and whether the user has a row of his own."""
    return np.frombuffer(bytearray(packed[:-1]), np.float32), bool(packed[-1])


def read_history(events: list[bytes]) -> tuple[I64, I64]:
    """(item keys, ts_us), oldest first, of the elements of a history list."""
    packed = np.frombuffer(b"".join(events), _EVENT)
    return packed["key"], packed["ts_us"]


def seed_histories(url: str, features: PeerFeatures) -> None:
    """Write every user's history."""
    commands = []
    for user_id, (keys, ts_us) in features.histories().items():
        events = [struct.pack("<qq", k, t) for k, t in zip(keys.tolist(), ts_us.tolist(), strict=True)]
        if events:
            commands.append(("RPUSH", history_key(user_id), *events))
    _run(url, commands)


def seed_rows(url: str, features: PeerFeatures) -> None:
    """Write every item's token and every user's vector."""
    items = zip(features.items.keys.tolist(), features.items.tokens[:-1], strict=True)
    users = features.user_vectors().items()
    _run(
        url,
        itertools.chain(
            (("SET", item_key(key), token.tobytes()) for key, token in items),
            (("SET", user_key(user_id), vector.tobytes() + bytes([own])) for user_id, (vector, own) in users),
        ),
    )


def _run(url: str, commands: Iterable[tuple[object, ...]]) -> None:
    with redis.Redis.from_url(url) as client:
        for batch in _batched(commands):
            pipeline = client.pipeline(transaction=False)
            for command in batch:
                pipeline.execute_command(*command)
            pipeline.execute()


def _batched(commands: Iterable[tuple[object, ...]]) -> Iterator[list[tuple[object, ...]]]:
    iterator = iter(commands)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
