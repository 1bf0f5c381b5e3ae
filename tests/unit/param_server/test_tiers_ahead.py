"""A table whose cold tier is ahead of it, as replicas and restarts find it: what that may change, and what not."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.holding import TierRules
from param_server.leaving import Departure
from param_server.rowstate import RowState
from param_server.tiers import TieredTable
from tests.unit.param_server.tiered import ColdDict, ManualLane, settled, tiered, value_of, write


@pytest.fixture
def lane() -> ManualLane:
    lane = ManualLane(ColdDict())
    lane.meet()
    return lane


def behind(lane: ManualLane, at: list[int]) -> TieredTable:
    """Room for one row; the log is applied up to `at[0]`, and another replica put key 7 below, complete up to 20."""
    table = tiered(1, 0, lane, TierRules(policy=Policy("lru")))
    table.follow(lambda keys: np.full(keys.size, at[0], np.uint64))
    table.turn()
    lane.cold.write([Departure(7, RowState(9, np.full(2, 7.0, np.float32)), 20, 1)])
    value_of(table, 7)
    settled(table, lane)
    assert value_of(table, 7) == 7.0
    return table


def test_what_another_replica_put_below_is_never_replaced_by_what_is_older(lane: ManualLane) -> None:
    at = [10]
    table = behind(lane, at)
    at[0] = 20
    write(table, Op.ASSIGN, [1], [30])
    settled(table, lane)
    assert 7 not in table.export().keys
    assert write(table, Op.ASSIGN, [7], [5], 5.0).full.size == 0
    settled(table, lane)
    value_of(table, 7)
    settled(table, lane)
    assert value_of(table, 7) == 7.0
    assert lane.cold.rows[7][0] == 9


def test_a_capture_leaves_out_what_is_ahead_of_it_until_the_log_is_there(lane: ManualLane) -> None:
    at = [10]
    table = behind(lane, at)
    assert not table.unsettled
    assert captured(table) == {}
    at[0] = 31
    write(table, Op.ASSIGN, [7], [30], 8.0)
    # Nothing was let go of since: what counts is where the log is now.
    assert captured(table) == {7: 8.0}


def test_what_is_ahead_when_the_cold_tier_loses_its_rows_holds_snapshots_up(lane: ManualLane) -> None:
    at = [10]
    table = behind(lane, at)
    lane.lose()
    table.turn()
    assert table.unsettled
    at[0] = 20
    table.turn()
    assert not table.unsettled
    assert captured(table) == {7: 7.0}


def captured(table: TieredTable) -> dict[int, float]:
    capture = table.capture_all()
    pieces = iter(lambda: capture.take(100), None)
    return {key: row[0] for piece in pieces for key, row in zip(piece.keys.tolist(), piece.rows.tolist(), strict=True)}
