"""Rows go to their partitions, in order, and count when the log has them."""

from __future__ import annotations

import numpy as np
import pytest

from infra.errors import LogUnavailable
from param_server.contract import BadRecord, Op, decode_batch
from param_server.publish import RECORD_ROWS, Publisher
from param_server.routing import partition_of
from tests.unit.param_server.support import N_PARTITIONS, SlowLog, keys_in


def rows_for(keys: np.ndarray) -> np.ndarray:
    return np.stack((np.arange(keys.size), keys % 97), axis=1).astype(np.float32)


def test_every_row_goes_to_its_partition_in_order() -> None:
    log = SlowLog()
    keys = np.random.default_rng(0).integers(-50, 50, 5000)
    rows = rows_for(keys)
    n = Publisher(log, "t", N_PARTITIONS).publish(Op.ASSIGN, 4, 7, keys, rows, 1)
    assert n == len(log.sent)
    got: dict[int, list[tuple[int, float]]] = {p: [] for p in range(N_PARTITIONS)}
    for topic, partition, value, _ in log.sent:
        batch = decode_batch(value)
        assert topic == "t"
        assert batch.keys.size <= RECORD_ROWS
        assert (partition_of(batch.keys, N_PARTITIONS) == partition).all()
        got[partition] += list(zip(batch.keys.tolist(), batch.rows[:, 0].tolist(), strict=True))
    for partition in range(N_PARTITIONS):
        mine = partition_of(keys, N_PARTITIONS) == partition
        assert got[partition] == list(zip(keys[mine].tolist(), rows[mine, 0].tolist(), strict=True))


def test_versions_stay_with_their_rows() -> None:
    log = SlowLog()
    keys = np.arange(20)
    Publisher(log, "t", N_PARTITIONS).publish(Op.ASSIGN, 4, 7, keys, rows_for(keys), 1, keys.astype(np.uint64) * 10)
    for _, _, value, _ in log.sent:
        batch = decode_batch(value)
        assert batch.versions is not None
        assert batch.versions.tolist() == (batch.keys * 10).tolist()


def test_a_delete_carries_no_rows() -> None:
    log = SlowLog()
    Publisher(log, "t", N_PARTITIONS).publish(Op.DELETE, 4, 7, np.array(keys_in(1)), np.empty((0, 2), np.float32), 1)
    assert decode_batch(log.sent[0][2]).dim == 2


def test_nothing_is_sent_when_one_row_is_wrong() -> None:
    log = SlowLog()
    keys = np.arange(5000)
    rows = rows_for(keys)
    rows[4000, 1] = np.nan
    with pytest.raises(BadRecord, match="non_finite"):
        Publisher(log, "t", N_PARTITIONS).publish(Op.ASSIGN, 4, 7, keys, rows, 1)
    assert log.sent == []


def test_flush_waits_for_the_log_and_says_how_far_it_is() -> None:
    log = SlowLog()
    publisher = Publisher(log, "t", N_PARTITIONS)
    publisher.publish(Op.ASSIGN, 4, 7, np.array(keys_in(1)), np.ones((1, 2), np.float32), 1)
    log.acknowledge()
    assert publisher.flush(1.0) == {1: 1}


def test_flush_does_not_pretend() -> None:
    publisher = Publisher(SlowLog(), "t", N_PARTITIONS)
    publisher.publish(Op.ASSIGN, 4, 7, np.array([1]), np.ones((1, 2), np.float32), 1)
    with pytest.raises(LogUnavailable):
        publisher.flush(0.01)
