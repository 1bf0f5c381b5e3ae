"""Lists of the rows asked for most: merged, and brought up in parts."""

from __future__ import annotations

import numpy as np

from param_server.holding import TierRules
from param_server.hotset import WarmUp, as_bytes, decode_lists, encode_list
from tests.unit.param_server.tiered import ColdDict, ManualLane, export_of, settled, tiered, value_of


def a_list(counts: dict[int, float]) -> bytes:
    return encode_list(np.array(list(counts), np.int64), np.array(list(counts.values()), np.float32))


def test_lists_are_merged_by_count_and_each_key_comes_once() -> None:
    keys, counts = decode_lists([a_list({-1: 3.0, 2: 9.0}), a_list({2: 1.0, 5: 4.0}), b"rubbish"], 10)
    assert keys.tolist() == [2, 5, -1]
    assert counts.tolist() == [9.0, 4.0, 3.0]
    assert decode_lists([a_list({-1: 3.0, 2: 9.0, 5: 4.0})], 2)[0].tolist() == [2, 5]


def test_no_list_is_an_empty_one() -> None:
    assert decode_lists([], 5)[0].size == decode_lists([b""], 5)[0].size == 0


def test_counts_fit_into_a_byte_and_are_never_nothing() -> None:
    assert as_bytes(np.array([0.01, 3.7, 1e9, np.nan], np.float32)).tolist() == [1, 3, 255, 1]


def test_a_warm_up_is_over_when_every_part_has_arrived() -> None:
    lane = ManualLane(ColdDict())
    lane.meet()
    table = tiered(2000, 0, lane, TierRules(admission_threshold=9))
    seeding = tiered(1, 0, lane)
    assert seeding.restore(export_of({key: (1, float(key)) for key in range(1500)}), lane.settle)
    settled(seeding, lane)
    warm_up = WarmUp(table, np.arange(1500))
    assert value_of(table, 1400) is None
    while warm_up.state != "warm":
        warm_up.turn()
        assert warm_up.health()["asked"] <= 1500
        settled(table, lane)
    assert int(table.lookup(np.arange(1499))[1].sum()) == 1499
