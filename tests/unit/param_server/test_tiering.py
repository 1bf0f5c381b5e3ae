"""Budgets of a shard: divided fairly, and what fits stays as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infra.clock import SystemClock
from infra.settings import Settings
from param_server.actor import tiering_of
from param_server.coldnote import ColdId, ColdNote
from param_server.contract import TableSpec
from param_server.generation import Place
from param_server.table.cpu import CpuTable
from param_server.table.evicting import bytes_for
from param_server.tiering import Tiering, Tiers, shares
from param_server.tiers import TieredTable
from param_server.updates import Progress, log_version


@given(budget=st.integers(0, 10_000), wants=st.dictionaries(st.text(max_size=3), st.integers(0, 5000), max_size=6))
def test_nobody_gets_more_than_he_wants_and_who_gets_less_gets_as_much_as_any(
    budget: int, wants: dict[str, int]
) -> None:
    given_ = shares(budget, wants)
    assert sum(given_.values()) <= budget
    assert all(given_[name] <= want for name, want in wants.items())
    short = [name for name, want in wants.items() if given_[name] < want]
    most = max(given_.values(), default=0)
    assert all(given_[name] >= most - len(wants) for name in short)
    if short:
        assert sum(given_.values()) == budget


def spec(name: str, table_id: int, capacity_rows: int) -> TableSpec:
    return TableSpec(name, table_id, 4, capacity_rows, np.zeros(4, np.float32))


def test_small_tables_stay_plain_and_a_large_one_gets_the_rest(tmp_path: Path) -> None:
    config = Tiering(hot_bytes=bytes_for(300, 4), warm_bytes=bytes_for(100, 4))
    tiers = Tiers(config, tmp_path, 1, Place(0, 1, 8), SystemClock())
    tables = tiers.tables({"bucket": spec("bucket", 2, 50), "item": spec("item", 4, 10_000)})
    assert isinstance(tables["bucket"], CpuTable)
    item = tables["item"]
    assert isinstance(item, TieredTable)
    assert 340 <= item.capacity_rows <= 352
    assert item.bytes <= bytes_for(400, 4) + 16_384
    assert list(tiers.health()["tables"]) == ["item"]
    assert not tiers.hold(snapshot_due=True)
    assert not tiers.unsettled


def test_order_is_the_position_of_the_partition_a_key_belongs_to(tmp_path: Path) -> None:
    tiers = Tiers(Tiering(hot_bytes=2000), tmp_path, 1, Place(0, 1, 1), SystemClock())
    table = tiers.tables({"item": spec("item", 4, 10_000)})["item"]
    assert isinstance(table, TieredTable)
    progress = {0: Progress(offset=5, log_epoch=2)}
    tiers.follow(progress, complete=True)
    orders = table._holding.place_in_log.orders  # the rows themselves do not show it
    assert orders(np.array([1])).tolist() == [log_version(5, 2)]
    progress[0].offset = 6
    assert orders(np.array([1])).tolist() == [log_version(6, 2)]


def test_settings_reach_the_tiers_and_without_a_budget_there_are_none() -> None:
    assert tiering_of(Settings(), "redis://here") is None
    settings = Settings(tier_hot_bytes=1 << 30, tier_eviction="lru", tier_admission=2, tier_new_keys="cold_only")
    tiering = tiering_of(settings, "redis://here")
    assert tiering is not None
    assert (tiering.hot_bytes, tiering.redis_url, tiering.stack) == (1 << 30, "redis://here", "trirank")
    rules = tiering.rules
    assert (rules.policy.kind, rules.admission_threshold, rules.new_keys) == ("lru", 2, "cold_only")
    off = tiering_of(Settings(tier_hot_bytes=1 << 30, tier_cold=False), "redis://here")
    assert off is not None
    assert off.redis_url is None


def test_the_note_of_the_cold_tier_outlives_the_process_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    note = ColdNote(folder, 5)
    assert note.read() == ColdId()
    note.keep("", 0)
    assert not folder.exists()
    note.keep("abc", 0)
    note.keep("def", 1)
    note.keep("", 0)
    assert ColdNote(folder, 5).read() == ColdId("def", 1)
    next(folder.iterdir()).write_bytes(b"{")
    assert ColdNote(folder, 5).read() == ColdId()


def test_each_generation_has_a_note_and_a_replica_without_one_begins_with_that_of_the_first(tmp_path: Path) -> None:
    first = ColdNote(tmp_path, 5)
    first.keep("abc", 1)
    assert ColdNote(tmp_path, 6).read() == ColdId()
    second = ColdNote(tmp_path, 5, replica=1)
    assert second.read() == ColdId("abc", 1)
    second.keep("def", 1)
    assert ColdNote(tmp_path, 5, replica=1).read() == ColdId("def", 2)
    assert ColdNote(tmp_path, 5).read() == ColdId("abc", 1)
