"""A fit on rows in shards that are killed on the way, and what a training refuses of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_ranker.samples import Samples
from edge_ranker.tables import Tables
from feature_service.schema import TABLE_IDS, FeatureSchema
from feature_service.timeline import Timeline, cut
from infra.clock import SystemClock
from infra.kafka import LogProducer
from infra.release import Release, TableRows, write_release
from param_server.shard import ShardConfig
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.empty import ROWS_ELSEWHERE, check_holds_no_trained_rows
from reranker.remote.fit import RemoteFit
from reranker.remote.rows import Change, RowsRefused, RowsUnavailable
from reranker.remote.stack import StackRows
from reranker.remote.working import RowIndex
from tests.bench.remote_training import stack_rows
from tests.brokers import Broker, make_broker
from tests.integration.shards import ShardProcess, Topics, make_topics, often, shard_config
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)
STALENESS = 2


def _empty(path: Path, **made_with: str) -> Release:
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    tables = {
        name: (
            table_id,
            TableRows(
                np.empty(0, np.int64),
                np.empty((0, SCHEMA.table_dim(name)), np.float32),
                np.empty(0, np.uint64),
                np.zeros(SCHEMA.table_dim(name), np.float32),
            ),
        )
        for name, table_id in TABLE_IDS.items()
    }
    return write_release(
        path, name=path.name, parent=None, created_us=1, schema=asdict(SCHEMA), schema_fingerprint=SCHEMA.fingerprint(),
        tables=tables, models={"edge": {"fp32": model}, "rerank": {"fp32": model}}, catalogue=[], users=[], requests=[],
        report={}, made_with=made_with,
    )  # fmt: skip


class Shards:
    """Two shards with snapshots as often as they can write them, and a log producer."""

    def __init__(self, folder: Path, broker: Broker, topics: Topics, release: Release) -> None:
        self._configs: list[ShardConfig] = [
            often(replace(shard_config(folder, broker.bootstrap, topics, i, 2), table_min_capacity_rows=1024))
            for i in range(2)
        ]
        self.release = release
        self.topics = topics
        self._processes = [ShardProcess(config, release) for config in self._configs]
        self.log = LogProducer(broker.bootstrap)
        self.log.start()

    def addresses(self) -> list[str]:
        return [process.address for process in self._processes]

    def restart(self, index: int) -> None:
        """kill -9, and another one that goes on from the snapshot and the log."""
        self._processes[index].kill()
        self._processes[index] = ShardProcess(self._configs[index], self.release)

    def kill(self, index: int) -> None:
        self._processes[index].kill()

    def close(self) -> None:
        self.log.close()
        for process in self._processes:
            process.kill()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    with ExitStack() as stack:
        broker = make_broker("embedded", tmp_path / "broker")
        stack.callback(broker.stop)
        shards = Shards(tmp_path, broker, make_topics(broker.bootstrap), _empty(tmp_path / "empty"))
        stack.callback(shards.close)
        yield shards


class Interrupted:
    """Rows of the shards; the shard `index` is killed and started again when step `at` is published."""

    def __init__(self, rows: StackRows, shards: Shards, at: dict[int, int]) -> None:
        self._rows = rows
        self._shards = shards
        self._at = at
        self.changed: dict[str, set[int]] = {name: set() for name in TABLE_IDS}

    def check(self, *args: Any) -> int:
        return self._rows.check(*args)

    def fetch(self, *args: Any) -> Any:
        return self._rows.fetch(*args)

    def publish(self, step: int, changes: Sequence[Change]) -> None:
        for change in changes:
            self.changed[change.table] |= set(change.keys.tolist())
        self._rows.publish(step, changes)
        if step in self._at:
            self._shards.restart(self._at[step])


def _samples(timeline: Timeline) -> Samples:
    return Samples(
        timeline, SCHEMA, timeline.train, rng=np.random.default_rng(0), batch_size=32, negatives_per_kind=2,
        bucket_share=0.5,
    )  # fmt: skip


def test_a_fit_survives_shards_that_are_killed_and_ends_with_the_rows_they_hold(shards: Shards) -> None:
    timeline = cut(small_dataset())
    torch.manual_seed(0)
    with torch.device("meta"):
        tables = Tables(SCHEMA, timeline, sparse=())
    rankers = Rankers(tables)
    rows = stack_rows(shards.release, shards.addresses(), shards.log, shards.topics.embeddings)
    rows.start()
    try:
        assert rows.check(SCHEMA.fingerprint(), {"item": 30, "user": 20}) == 0
        service = Interrupted(rows, shards, {4: 0, 9: 1})
        recipe = replace(Recipe(), batch_size=32)
        fit = RemoteFit(rankers, recipe, service, seed=3, staleness=STALENESS, clock=SystemClock())
        log = fit.run(_samples(timeline), passes=2, on_step=lambda: None)
        assert log[1]["recall_loss"] < log[0]["recall_loss"]
        index = RowIndex(tables)
        held = rows.fetch(index.keys, -1).result(30)
        for name in TABLE_IDS:
            found = held[name].found
            assert set(index.keys[name][found].tolist()) == service.changed[name]
            if name != "user_bucket":  # those nobody fell into got the mean row at the end
                np.testing.assert_array_equal(getattr(tables, name).detach().numpy()[found], held[name].rows[found])
        assert rows.counters()["dead_letters"] == 0
    finally:
        rows.close()


def test_a_shard_that_stays_away_ends_the_training_with_its_number(shards: Shards) -> None:
    rows = stack_rows(shards.release, shards.addresses(), shards.log, shards.topics.embeddings, patience_s=1.0)
    rows.start()
    try:
        shards.kill(1)
        keys = np.arange(200, dtype=np.int64)
        with pytest.raises(RowsUnavailable, match=r"shards \[1\] do not answer within 1 s"):
            rows.fetch({"item": keys}, -1).result(30)
        rows.publish(0, [Change("item", keys, np.ones((200, 32), np.float32), first=True)])
        with pytest.raises(RowsUnavailable, match=r"shards \[1\] do not answer within 1 s"):
            rows.fetch({"item": keys[:0]}, 0).result(30)
    finally:
        rows.close()


def test_a_release_that_serves_users_is_no_place_to_train_rows(tmp_path: Path) -> None:
    with pytest.raises(RowsRefused, match=r"the stack serves release served, .* --empty-tables"):
        check_holds_no_trained_rows(_empty(tmp_path / "served"))
    check_holds_no_trained_rows(_empty(tmp_path / "empty", rows=ROWS_ELSEWHERE))
