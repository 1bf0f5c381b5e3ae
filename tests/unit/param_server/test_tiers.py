"""What a tiered table does, one rule at a time; that no interleaving breaks them is in test_tiers_model.py."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.holding import TierRules
from param_server.table import Export
from param_server.tiers import TieredTable
from tests.unit.param_server.tiered import (
    ColdDict,
    FakeClock,
    ManualLane,
    export_of,
    settled,
    tiered,
    value_of,
    write,
)


@pytest.fixture
def lane() -> ManualLane:
    lane = ManualLane(ColdDict())
    lane.meet()
    return lane


def full_table(lane: ManualLane, rules: TierRules | None = None, clock: FakeClock | None = None) -> TieredTable:
    """Room for two rows; 1 to 4 were put in and have settled."""
    table = tiered(2, 0, lane, rules or TierRules(policy=Policy("lru")), clock)
    table.turn()
    for key in (1, 2, 3, 4):
        write(table, Op.ASSIGN, [key], [10], float(key))
    settled(table, lane)
    return table


def held(table: TieredTable) -> set[int]:
    return set(table.export().keys.tolist())


def test_a_missing_row_has_the_default_at_once_and_is_there_after_a_turn(lane: ManualLane) -> None:
    table = full_table(lane)
    away = next(key for key in (1, 2, 3, 4) if key not in held(table))
    rows, found = table.lookup(np.array([away]))
    assert (rows.tolist(), found.tolist()) == ([[9.0, 9.0]], [False])
    settled(table, lane)
    assert value_of(table, away) == float(away)


def test_a_row_is_fetched_only_when_it_was_asked_for_often_enough(lane: ManualLane) -> None:
    table = full_table(lane, TierRules(policy=Policy("lru"), admission_threshold=5))
    away = next(key for key in (1, 2, 3, 4) if key not in held(table))
    for _ in range(3):
        table.lookup(np.array([away]))
    assert table.asked == 0
    table.lookup(np.array([away]))
    assert table.asked == 1


def test_an_unchanged_row_is_not_written_below_again(lane: ManualLane) -> None:
    table = full_table(lane)
    stored = table.health()["cold"]["stored"]
    for key in (1, 2, 3, 4) * 3:
        value_of(table, key)
        settled(table, lane)
    health = table.health()["cold"]
    # The two that were still held had never been below.
    assert health["stored"] <= stored + 2
    assert health["dropped"] > 0


def test_a_row_on_its_way_down_is_answered_and_written_to(lane: ManualLane) -> None:
    table = tiered(1, 0, lane)
    table.turn()
    write(table, Op.ASSIGN, [1], [10], 1.0)
    write(table, Op.ASSIGN, [2], [10], 2.0)
    assert table.leaving == 1
    assert {key: value_of(table, key) for key in (1, 2)} == {1: 1.0, 2: 2.0}
    gone = next(iter(held(table) - {2}))
    table.turn()
    write(table, Op.ADD, [gone], [11], 5.0)
    lane.act_write()
    lane.deliver()
    table.turn()
    assert table.leaving == 1, "what was sent is not what it is now"
    assert value_of(table, gone) == gone + 5.0
    settled(table, lane)
    assert lane.cold.rows[gone][0] == 11


def test_where_a_new_key_goes_is_the_rule_of_the_table(lane: ManualLane) -> None:
    table = full_table(lane, TierRules(new_keys="cold_only"))
    assert table.health()["hot_rows"] == 0
    assert set(lane.cold.rows) == {1, 2, 3, 4}
    other = ManualLane(ColdDict())
    other.meet()
    table = full_table(other, TierRules(new_keys="if_admitted", admission_threshold=2))
    assert table.health()["hot_rows"] == 0
    for _ in range(2):
        table.lookup(np.array([7]))
    settled(table, other)
    write(table, Op.ASSIGN, [7], [50], 7.0)
    assert table.health()["hot_rows"] == 1


def test_a_delete_reaches_the_cold_tier_with_its_version(lane: ManualLane) -> None:
    table = full_table(lane)
    for key in (1, 2, 3, 4):
        write(table, Op.DELETE, [key], [20])
    settled(table, lane)
    assert {key: (version, row) for key, (version, _, row) in lane.cold.rows.items()} == dict.fromkeys(
        (1, 2, 3, 4), (20, None)
    )
    assert held(table) == set()
    write(table, Op.ASSIGN, [1], [19], 5.0)
    settled(table, lane)
    assert value_of(table, 1) is None


def test_an_add_to_a_cold_row_waits_for_it_and_a_snapshot_with_it(lane: ManualLane) -> None:
    table = full_table(lane)
    away = next(key for key in (1, 2, 3, 4) if key not in held(table))
    assert write(table, Op.ADD, [away], [11], 100.0).applied == 1
    assert table.waiting
    assert table.unsettled
    settled(table, lane)
    assert not table.unsettled
    assert value_of(table, away) == away + 100.0


def test_an_add_to_a_key_that_is_surely_nowhere_does_not_wait(lane: ManualLane) -> None:
    table = full_table(lane)
    table.lookup(np.array([77]))
    settled(table, lane)
    write(table, Op.ADD, [77], [11], 100.0)
    assert not table.waiting
    assert value_of(table, 77) == 100.0


def test_a_sum_that_is_not_finite_is_dropped_and_counted(lane: ManualLane) -> None:
    table = full_table(lane)
    away = next(key for key in (1, 2, 3, 4) if key not in held(table))
    write(table, Op.ADD, [away], [11], 3e38)
    write(table, Op.ADD, [away], [12], 3e38)
    settled(table, lane)
    assert table.health()["cold"]["overflow"] == 1
    assert value_of(table, away) == pytest.approx(3e38)


def test_while_redis_is_away_misses_are_defaults_and_the_stream_waits_only_when_much_must_go_down() -> None:
    lane = ManualLane(ColdDict())
    lane.meet()
    table = tiered(2, 0, lane, TierRules(policy=Policy("lru"), most_leaving=3))
    table.turn()
    for key in range(1, 5):
        assert not table.hold
        write(table, Op.ASSIGN, [key], [10], float(key))
        table.turn()
    write(table, Op.ASSIGN, [5], [10], 5.0)
    assert table.hold
    assert {key: value_of(table, key) for key in range(1, 6)} == {key: float(key) for key in range(1, 6)}
    assert value_of(table, 77) is None
    settled(table, lane)
    assert not table.hold


def test_a_read_that_failed_is_not_tried_again_at_once(lane: ManualLane) -> None:
    clock = FakeClock()
    table = full_table(lane, clock=clock)
    away = next(key for key in (1, 2, 3, 4) if key not in held(table))
    value_of(table, away)
    table.turn()
    lane.fail_read()
    lane.deliver()
    table.turn()
    value_of(table, away)
    assert table.asked == 0
    clock.s += 1.5
    value_of(table, away)
    assert table.asked == 1


def test_a_row_found_warm_moves_up_if_it_is_used_more_than_what_it_displaces() -> None:
    clock = FakeClock()
    table = tiered(2, 2, None, TierRules(policy=Policy("lfu", half_life_s=600.0)), clock)
    for key in (1, 2, 3, 4):
        write(table, Op.ASSIGN, [key], [10], float(key))
    hot = {int(key) for key in table.hottest(2)[0]}
    below = sorted({1, 2, 3, 4} - hot)
    for _ in range(5):
        assert value_of(table, below[0]) == float(below[0])
    table.turn()
    assert below[0] in table.hottest(2)[0].tolist()
    assert below[1] not in table.hottest(2)[0].tolist()
    assert held(table) == {1, 2, 3, 4}


def test_a_pinned_row_stays_hot(lane: ManualLane) -> None:
    table = tiered(2, 0, lane, TierRules(policy=Policy("lru")))
    table.turn()
    write(table, Op.ASSIGN, [1], [10], 1.0)
    table.pin(np.array([1]))
    for key in range(2, 30):
        write(table, Op.ASSIGN, [key], [10], float(key))
        settled(table, lane)
    assert 1 in held(table)
    assert 1 not in lane.cold.rows


def test_with_ttl_rows_go_down_when_their_time_is_over_and_are_not_lost(lane: ManualLane) -> None:
    clock = FakeClock()
    table = full_table(lane, TierRules(policy=Policy("ttl", ttl_s=60.0)), clock)
    assert table.health()["hot_rows"] == 2
    clock.s += 61
    settled(table, lane)
    assert table.health()["hot_rows"] == 0
    assert set(lane.cold.rows) == {1, 2, 3, 4}


def test_rows_that_were_asked_for_most_are_hot_after_a_start(lane: ManualLane) -> None:
    table = tiered(3, 0, lane, TierRules(policy=Policy("lfu")))
    table.seed(np.array([40, 50, 60]), np.array([9, 5, 7], np.uint8))
    assert table.restore(export_of({key: (1, float(key)) for key in range(100)}), lane.settle)
    assert table.hottest(3)[0].tolist() == [40, 60, 50]


def test_entries_older_than_the_cold_tier_are_not_put_over_it(lane: ManualLane) -> None:
    table = full_table(lane)
    for key in (1, 2, 3):
        write(table, Op.ASSIGN, [key], [20], 20.0 + key)
    write(table, Op.DELETE, [4], [21])
    for key in range(5, 9):
        write(table, Op.ASSIGN, [key], [22], 1.0)
    settled(table, lane)
    again = ManualLane(lane.cold)
    again.meet()
    fresh = tiered(8, 0, again)
    fresh.follow(lambda keys: np.full(keys.size, 1000, np.uint64))
    release = export_of({key: (1, float(key)) for key in range(1, 5)})
    assert fresh.restore(release, again.settle, again.cold.read)
    settled(fresh, again)
    assert {key: value_of(fresh, key) for key in (1, 2, 3, 4)} == {1: 21.0, 2: 22.0, 3: 23.0, 4: None}


def test_without_a_cold_tier_what_does_not_fit_is_not_restored() -> None:
    state = export_of(dict.fromkeys(range(5), (1, 1.0)))
    assert tiered(2, 3).restore(state, lambda: None)
    assert not tiered(2, 2).restore(state, lambda: None)


def test_a_lost_cold_tier_gets_again_what_is_held(lane: ManualLane) -> None:
    table = full_table(lane)
    for key in (1, 2, 3, 4):
        value_of(table, key)
        settled(table, lane)
    kept = held(table)
    lane.cold.rows.clear()
    lane.lose()
    table.turn()
    for key in range(10, 14):
        write(table, Op.ASSIGN, [key], [30], 1.0)
        settled(table, lane)
    assert kept <= set(lane.cold.rows)


def test_export_holds_what_is_on_its_way_down(lane: ManualLane) -> None:
    table = tiered(1, 0, lane)
    table.turn()
    write(table, Op.ASSIGN, [1], [10], 1.0)
    write(table, Op.ASSIGN, [2], [11], 2.0)
    write(table, Op.DELETE, [3], [12])
    got: Export = table.export()
    assert sorted(zip(got.keys.tolist(), got.versions.tolist(), got.tombstones.tolist(), strict=True)) == [
        (1, 10, False), (2, 11, False), (3, 12, True),
    ]  # fmt: skip
    assert sorted(table.export(since_version=12).keys.tolist()) == [3]
    assert (table.size, table.tombstones) == (2, 1)
