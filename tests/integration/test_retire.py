"""Generations that are no longer served leave nothing behind, and the others lose nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.errors import RedisUnavailable
from infra.redis import connect
from infra.release import Release
from param_server import retire
from param_server.cold import ColdStore
from param_server.leaving import Departure
from param_server.retire import drop_unserved
from param_server.rowstate import RowState
from param_server.tiering import Tiering
from tests.integration.shards import Topics, ask_snapshot, asking, running, shard_config

STACK = "some"


def fill(redis: EmbeddedRedis, generation: int, n: int = 30, stack: str = STACK) -> ColdStore:
    """Rows whose keys have every kind of byte in them, floors, a list and a partition with gaps."""
    store = ColdStore(redis.url, f"{stack}:c:{generation}")
    store.identity()
    keys = [*range(n), int.from_bytes(b"4#floors", "little"), int.from_bytes(b":1#hot\0\0", "little")]
    store.write(4, [Departure(key, RowState(1, np.ones(2, np.float32)), 1, 0) for key in keys], gaps=[3])
    store.put_hot(4, 0, 1, b"")
    return store


def names(redis: EmbeddedRedis, prefix: str) -> int:
    with connect(redis.url) as client:
        return sum(name.startswith(prefix.encode()) for name in client.scan_iter(count=1000))


def test_cold_rows_of_generations_that_nobody_serves_go_and_no_others(redis: EmbeddedRedis, tmp_path: Path) -> None:
    for generation in (1, 12, 2):
        fill(redis, generation)
    fill(redis, 1, stack="other")
    served, other = names(redis, f"{STACK}:c:12"), names(redis, "other:c:1")
    folder = tmp_path / STACK / "of-1" / "shard-0"
    folder.mkdir(parents=True)
    notes = [folder / f"cold-id-{name}.json" for name in ("1", "1.r1", "12")]
    for note in notes:
        note.write_text("{}")
    assert drop_unserved(redis.url, STACK, tmp_path, {12}) == [1, 2]
    assert (names(redis, f"{STACK}:c:12"), names(redis, "other:c:1")) == (served, other)
    assert names(redis, f"{STACK}:c:") == served
    assert list(folder.iterdir()) == notes[2:]
    assert drop_unserved(redis.url, STACK, tmp_path, {12}) == []


def test_a_drop_that_was_interrupted_is_finished_by_the_next(
    redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill(redis, 5, stack="again")
    identity = store.identity()
    monkeypatch.setattr(retire, "_AT_ONCE", 10)
    drop = type(connect(redis.url)).unlink
    calls = 0

    def interrupted(self: object, *keys: bytes) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ConnectionResetError
        return drop(self, *keys)

    with monkeypatch.context() as patched:
        patched.setattr(type(connect(redis.url)), "unlink", interrupted)
        with pytest.raises(RedisUnavailable):
            drop_unserved(redis.url, "again", tmp_path, set())
    assert names(redis, "again:c:5") > 0
    # A shard of it that starts now is told that rows are gone.
    assert store.identity() != identity
    with connect(redis.url) as client:
        client.delete("again:c:5#id")
    assert drop_unserved(redis.url, "again", tmp_path, set()) == [5]
    assert names(redis, "again:c:5") == 0


def test_a_generation_with_a_snapshot_of_the_stack_is_kept_and_one_served_beside_goes(
    broker: EmbeddedBroker, redis: EmbeddedRedis, release: Release, topics: Topics, tmp_path: Path
) -> None:
    generation = release.manifest.generation
    root = tmp_path / "snapshots"
    config = replace(
        shard_config(tmp_path, broker.bootstrap, topics),
        snapshot_root=root / "s",
        tiers=Tiering(hot_bytes=600, redis_url=redis.url, stack="s"),
    )
    with running(config, release) as address, asking(release, address) as caller:
        ask_snapshot(caller)
    side = root / f"s.{generation:08x}"
    for folder in (side, root / "s.0000beef", root / "s.words", root / "t.0000beef"):
        folder.mkdir()
    assert drop_unserved(redis.url, "s", root, {0xBEEF}) == []
    assert names(redis, f"s:c:{generation}") > 10
    assert sorted(folder.name for folder in root.iterdir()) == ["s", "s.0000beef", "s.words", "t.0000beef"]
