"""What every service of rows keeps: rows in memory that other tests use, and shards behind a log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from infra.kafka import LogProducer
from infra.release import read_release
from param_server.contract import Op
from reranker.remote.rows import Change, RowService, RowsRefused
from reranker.remote.stack import StackRows
from tests.bench.remote_training import stack_rows
from tests.brokers import make_broker
from tests.integration.shards import DIM, ITEM, ShardProcess, make_release, make_topics, publishing, shard_config
from tests.rows_in_memory import RowsInMemory

NEW = 1_000_000
N_KEYS = 64


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackRows]:
    folder = tmp_path_factory.mktemp("rows")
    with ExitStack() as stack:
        broker = make_broker("embedded", folder / "broker")
        stack.callback(broker.stop)
        release = make_release(folder / "release")
        topics = make_topics(broker.bootstrap)
        configs = [shard_config(folder, broker.bootstrap, topics, index, 2) for index in range(2)]
        processes = [ShardProcess(replace(config, table_min_capacity_rows=4096), release) for config in configs]
        for process in processes:
            stack.callback(process.kill)
        log = LogProducer(broker.bootstrap)
        log.start()
        stack.callback(log.close)
        rows = stack_rows(read_release(release.path), [p.address for p in processes], log, topics.embeddings)
        rows.start()
        stack.callback(rows.close)
        rows.other = stack.enter_context(publishing(broker.bootstrap, topics))  # type: ignore[attr-defined]
        rows.generation = release.manifest.generation  # type: ignore[attr-defined]
        yield rows


@pytest.fixture(params=["memory", "shards"])
def service(request: pytest.FixtureRequest) -> RowService:
    if request.param == "memory":
        return RowsInMemory({"item": DIM, "user": DIM}, late=3)
    rows: StackRows = request.getfixturevalue("shards")
    rows._published.clear()
    return rows


_tests = itertools.count(1)


@pytest.fixture
def keys() -> np.ndarray:
    """Keys that no other test uses."""
    base = NEW * next(_tests)
    return np.arange(base, base + N_KEYS, dtype=np.int64)


def _rows(value: float) -> np.ndarray:
    return np.full((N_KEYS, DIM), value, np.float32) + np.arange(N_KEYS, dtype=np.float32)[:, None]


def test_what_was_never_published_is_missing(service: RowService, keys: np.ndarray) -> None:
    got = service.fetch({"item": keys, "user": keys[:3]}, -1).result(30)
    assert not got["item"].found.any()
    assert got["user"].rows.shape == (3, DIM)


def test_a_fetch_sees_every_step_it_waits_for(service: RowService, keys: np.ndarray) -> None:
    service.publish(0, [Change("item", keys, _rows(1.0), first=True)])
    for step in range(1, 5):
        service.publish(step, [Change("item", keys, _rows(0.5))])
        got = service.fetch({"item": keys[::-1].copy()}, step).result(30)["item"]
        assert got.found.all()
        index = np.arange(N_KEYS, dtype=np.float32)[::-1, None]
        np.testing.assert_allclose(got.rows, np.broadcast_to((1 + step) * index + 1.0 + 0.5 * step, got.rows.shape))


def test_a_first_value_yields_to_a_row_that_is_there(service: RowService, keys: np.ndarray) -> None:
    service.publish(0, [Change("item", keys, _rows(1.0), first=True), Change("item", keys, _rows(2.0))])
    service.publish(1, [Change("item", keys, _rows(50.0), first=True)])
    got = service.fetch({"item": keys}, 1).result(30)["item"]
    np.testing.assert_array_equal(got.rows, _rows(1.0) + _rows(2.0))


def test_steps_without_changes_and_tables_without_keys_are_fine(service: RowService, keys: np.ndarray) -> None:
    service.publish(0, [])
    got = service.fetch({"item": keys[:0], "user": keys[:1]}, 0).result(30)
    assert got["item"].rows.shape == (0, DIM)
    assert got["user"].found.tolist() == [False]


def test_shards_of_another_schema_or_without_room_are_refused(shards: StackRows) -> None:
    with pytest.raises(RowsRefused, match="feature schema abc, this log needs xyz"):
        shards.check("xyz", {"item": 1})
    too_many = r"table item needs 10,000,000 rows, .* TRIRANK_TABLE_MIN_CAPACITY_ROWS=6000001"
    with pytest.raises(RowsRefused, match=too_many):
        shards.check("abc", {"item": 10_000_000})
    assert shards.check("abc", {"item": 60, "user": 60}) >= 100


def test_changes_of_another_trainer_add_up(shards: StackRows, keys: np.ndarray) -> None:
    shards._published.clear()
    shards.publish(0, [Change("item", keys, _rows(1.0), first=True), Change("item", keys, _rows(1.0))])
    shards.fetch({"item": keys}, 0).result(30)
    generation = shards.generation  # type: ignore[attr-defined]
    other = shards.other  # type: ignore[attr-defined]
    other.publish(Op.ASSIGN, ITEM, generation, keys, _rows(9.0), 1, base_version=1)
    other.publish(Op.ADD, ITEM, generation, keys, _rows(2.0), 1)
    other.flush()
    shards.publish(1, [Change("item", keys, _rows(3.0))])
    got = shards.fetch({"item": keys}, 1).result(30)["item"]
    np.testing.assert_array_equal(got.rows, _rows(1.0) + _rows(1.0) + _rows(2.0) + _rows(3.0))
