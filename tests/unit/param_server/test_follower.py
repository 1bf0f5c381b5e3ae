"""What the owner of the tables makes of the feed: rows, positions, watermark, losses."""

from __future__ import annotations

import itertools

from param_server.contract import BadRecord
from param_server.deadletter import FULL_AT, DeadLetters
from param_server.feed import Feed, Gap, LogChange
from param_server.follower import Follower
from param_server.snapshot import LogState, Position
from param_server.table.cpu import CpuTable
from param_server.updates import Letter, StreamRecord
from tests.unit.param_server.support import (
    GENERATION,
    ITEM,
    N_PARTITIONS,
    Op,
    SlowLog,
    SteppingClock,
    a_batch,
    a_record,
    a_table,
    keys_in,
    value_of,
)

KEYS = [keys_in(0)[0], keys_in(1)[0]]
CREATED_US = 500


def a_follower(
    log: LogState | None = None, clock: SteppingClock | None = None
) -> tuple[Follower, Feed, CpuTable, DeadLetters]:
    clock = clock or SteppingClock()
    feed, table, letters = Feed(1 << 20), a_table(), DeadLetters(SlowLog(), "dead", "t", SteppingClock())
    follower = Follower(
        feed,
        letters,
        {GENERATION: {ITEM: table}},
        log or LogState.from_the_beginning(range(N_PARTITIONS)),
        n_partitions=N_PARTITIONS,
        created_us=CREATED_US,
        clock=clock,
    )
    return follower, feed, table, letters


def test_a_step_applies_what_waits_and_says_whether_more_does() -> None:
    follower, feed, table, _ = a_follower()
    for offset in range(3):
        feed.put(a_record(a_batch([KEYS[0]], float(offset)), offset=offset))
    assert not follower.step(1.0)
    assert value_of(table, KEYS[0]) == 2.0
    assert follower.changed
    assert follower.log_state().positions[0].offset == 3


def test_a_step_ends_with_its_budget_but_always_gets_on() -> None:
    follower, feed, table, _ = a_follower(clock=SteppingClock(step_s=0.001))
    for offset in range(10):
        # Ordered by their producer, so that each is applied by itself.
        feed.put(a_record(a_batch([KEYS[0]], float(offset), base_version=offset + 1), offset=offset))
    assert follower.step(0.0)
    assert value_of(table, KEYS[0]) == 0.0
    assert follower.step(0.002)
    assert value_of(table, KEYS[0]) == 2.0


def test_fewer_neighbours_are_applied_together_while_a_table_is_slow() -> None:
    clock = SteppingClock(step_s=0.02)
    follower, feed, _, _ = a_follower(clock=clock)
    offsets = itertools.count()

    def applied_by_a_step() -> int:
        before = follower.log_state().positions[0].offset
        while before + 9 > (offset := next(offsets)):
            feed.put(a_record(a_batch([KEYS[0]] * 1000), offset=offset))
        feed.put(a_record(a_batch([KEYS[0]] * 1000), offset=offset))
        follower.step(0.002)
        return follower.log_state().positions[0].offset - before

    assert [applied_by_a_step() for _ in range(5)] == [8, 4, 2, 1, 1]
    clock.step_s = 0.003
    assert [applied_by_a_step() for _ in range(4)] == [1, 2, 4, 8]


def test_an_idle_step_changes_nothing() -> None:
    follower, _, _, _ = a_follower()
    assert not follower.step(1.0)
    assert not follower.changed


def test_bad_records_are_counted_and_sent_away_without_stopping_the_others() -> None:
    follower, feed, table, letters = a_follower()
    feed.put(StreamRecord(0, 0, b"x", BadRecord("magic", "")))
    feed.put(a_record(a_batch([KEYS[0]], 5.0), offset=1))
    follower.step(1.0)
    assert value_of(table, KEYS[0]) == 5.0
    assert letters.pending == 1
    assert follower.health()["counters"] == {
        "records": 2, "repeated": 0, "applied": 1, "stale": 0, "refused": 0, "dead_letters": 1,
    }  # fmt: skip


def test_the_stream_waits_while_too_many_letters_are_not_acknowledged() -> None:
    follower, feed, table, letters = a_follower()
    for _ in range(FULL_AT):
        letters.put(Letter("crc", "", 0, 0, b""))
    feed.put(a_record(a_batch([KEYS[0]])))
    assert not follower.step(1.0)
    assert table.size == 0


def test_lag_is_what_the_log_has_beyond_the_positions() -> None:
    follower, feed, _, _ = a_follower()
    feed.put(a_record(a_batch([KEYS[0]]), offset=0))
    follower.step(1.0)
    follower.set_highwater({0: 4, 1: 0})
    assert follower.lag() == {0: 3, 1: 0}


def test_the_watermark_is_the_latest_event_while_nothing_lags() -> None:
    follower, feed, _, _ = a_follower()
    assert follower.watermark_us == CREATED_US
    feed.put(a_record(a_batch([KEYS[0]], event_time_us=2000), offset=0))
    feed.put(a_record(a_batch([KEYS[1]], event_time_us=3000), offset=0, partition=1))
    follower.step(1.0)
    assert follower.watermark_us == 3000


def test_the_watermark_is_that_of_the_slowest_partition_that_lags() -> None:
    follower, feed, _, _ = a_follower()
    feed.put(a_record(a_batch([KEYS[0]], event_time_us=2000), offset=0))
    feed.put(a_record(a_batch([KEYS[1]], event_time_us=3000), offset=0, partition=1))
    follower.step(1.0)
    follower.set_highwater({0: 2, 1: 1})
    assert follower.watermark_us == 2000


def test_a_lost_log_is_counted_once_whatever_partitions_it_had_and_its_new_records_outrank_the_old() -> None:
    old = LogState("old", {0: Position(100, 0, 1), 1: Position(7, 0, 0)}, 0, 0)
    follower, feed, table, _ = a_follower(old)
    feed.put(a_record(a_batch([KEYS[0]], 1.0), offset=100))
    feed.put(LogChange("new", (Gap(0, 101, 0, lost=True), Gap(1, 7, 0, lost=True))))
    feed.put(a_record(a_batch([KEYS[0]], 2.0), offset=0))
    follower.step(1.0)
    assert value_of(table, KEYS[0]) == 2.0
    health = follower.health()
    assert (health["log_identity"], health["log_epoch"], health["log_losses"]) == ("new", 1, 1)
    assert not health["complete"]
    assert follower.log_state().positions == {0: Position(1, 1, 1000), 1: Position(0, 1, 0)}


def test_records_cut_off_by_retention_are_counted_and_the_versions_go_on() -> None:
    old = LogState("same", {0: Position(5, 0, 1), 1: Position(0, 0, 0)}, 0, 0)
    follower, feed, table, _ = a_follower(old)
    feed.put(LogChange("same", (Gap(0, 5, 50, lost=False),)))
    feed.put(a_record(a_batch([KEYS[0]], 1.0), offset=50))
    follower.step(1.0)
    health = follower.health()
    assert (health["log_epoch"], health["log_truncations"], health["complete"]) == (0, 1, False)
    assert value_of(table, KEYS[0]) == 1.0


def test_a_shard_that_sees_a_log_for_the_first_time_begins_where_the_log_begins() -> None:
    follower, feed, _, _ = a_follower()
    feed.put(LogChange("log", (Gap(0, 0, 50, lost=False),)))
    follower.step(1.0)
    assert follower.health()["complete"]
    assert follower.log_state().positions[0].offset == 50


def test_an_add_is_counted_once_when_the_log_is_read_again() -> None:
    follower, feed, table, _ = a_follower()
    record = a_record(a_batch([KEYS[0]], 1.0, op=Op.ADD), offset=0)
    feed.put(record)
    feed.put(record)
    follower.step(1.0)
    assert value_of(table, KEYS[0]) == 1.0
    assert follower.health()["counters"]["repeated"] == 1


class Watch(SteppingClock):
    def now_us(self) -> int:
        return int(self.time_s * 1e6)


def test_staleness_grows_while_something_waits_or_nobody_is_heard_and_ends_when_all_is_applied() -> None:
    clock = Watch()
    follower, feed, _, _ = a_follower(clock=clock)
    follower.set_highwater({0: 1, 1: 0})
    clock.time_s = 3.0
    assert follower.staleness_s == 3.0
    feed.put(a_record(a_batch([KEYS[0]]), offset=0))
    follower.step(1.0)
    follower.set_highwater({0: 1, 1: 0})
    assert follower.staleness_s == 0.0
    follower.set_highwater({0: 1, 1: 0}, connected=False)
    clock.time_s = 5.0
    assert follower.staleness_s == 2.0
    assert follower.health()["staleness_s"] == 2.0


def test_where_a_shard_began_is_told_once_and_only_when_it_had_no_position() -> None:
    follower, feed, _, _ = a_follower()
    feed.put(LogChange("log", (Gap(0, 0, 50, lost=False),)))
    feed.put(a_record(a_batch([KEYS[0]]), offset=50))
    follower.step(1.0)
    began = follower.take_began()
    assert began is not None
    assert (began.identity, began.positions[0].offset) == ("log", 50)
    assert follower.take_began() is None
    again, feed, _, _ = a_follower(LogState("log", {0: Position(5, 0, 1), 1: Position(0, 0, 0)}, 0, 0))
    feed.put(LogChange("log"))
    again.step(1.0)
    assert again.take_began() is None
