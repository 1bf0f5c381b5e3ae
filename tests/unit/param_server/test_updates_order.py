"""Out of order, twice, read again, by several producers, spread over other shards: the final table is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op, UpdateBatch
from param_server.generation import Generation, Place, fill_from_state
from param_server.routing import partition_of, partitions_of_shard
from param_server.table import EmbeddingTable
from param_server.updates import Progress, StreamRecord, apply_records
from tests.unit.param_server.support import DIM, GENERATION, ITEM, N_PARTITIONS, a_batch, a_record, a_table, keys_in
from tests.unit.param_server.tiered import tiered

State = dict[int, tuple[int, float | None]]
Tables = Sequence[EmbeddingTable]
KEYS = [*keys_in(0, 4), *keys_in(1, 4)]


def tiers(capacity_rows: int = 16) -> EmbeddingTable:
    """Three rows hot, the others warm."""
    return tiered(3, capacity_rows - 3, dim=DIM, default=np.zeros(DIM, np.float32))


MAKES = pytest.mark.parametrize("make", [a_table, tiers], ids=["plain", "tiers"])

# What one producer sends: operation, key, and a version that no other write has. The row is the version.
writes = st.lists(st.tuples(st.sampled_from([Op.ASSIGN, Op.DELETE]), st.sampled_from(KEYS)), min_size=1, max_size=20)


def versioned(plan: Sequence[tuple[Op, int]]) -> list[UpdateBatch]:
    return [a_batch([key], float(v), op=op, versions=[v]) for v, (op, key) in enumerate(plan, start=1)]


def newest(batches: Sequence[UpdateBatch]) -> State:
    """Of each key the write of the greatest version: what the table must hold, worked out apart."""
    state: State = {}
    for batch in batches:
        key, version = int(batch.keys[0]), int(batch.versions[0]) if batch.versions is not None else -1
        if version > state.get(key, (-1, None))[0]:
            state[key] = (version, None if batch.op is Op.DELETE else float(version))
    return state


def logged(batches: Sequence[UpdateBatch]) -> list[StreamRecord]:
    """The records in the order in which the broker took them."""
    offsets = [0] * N_PARTITIONS
    records = []
    for batch in batches:
        partition = int(partition_of(batch.keys, N_PARTITIONS)[0])
        records.append(a_record(batch, offsets[partition], partition))
        offsets[partition] += 1
    return records


def applied(records: Sequence[StreamRecord], table: EmbeddingTable, progress: dict[int, Progress]) -> None:
    for record in records:
        outcome = apply_records([record], {GENERATION: {ITEM: table}}, progress, N_PARTITIONS)
        assert outcome.refused == 0


def start() -> dict[int, Progress]:
    return {p: Progress() for p in range(N_PARTITIONS)}


def held(*tables: EmbeddingTable) -> State:
    state: State = {}
    for table in tables:
        got = table.export()
        columns = zip(got.keys.tolist(), got.versions.tolist(), got.tombstones.tolist(), got.rows, strict=True)
        for key, version, dead, row in columns:
            assert key not in state
            assert row[0] == row[-1]
            state[key] = (version, None if dead else float(row[0]))
    return state


@MAKES
@settings(max_examples=60)
@given(plan=writes, data=st.data())
def test_versioned_writes_in_any_order_and_number_leave_the_same_table(
    make: Callable[[], EmbeddingTable], plan: list[tuple[Op, int]], data: st.DataObject
) -> None:
    batches = versioned(plan)
    sent_again = data.draw(st.lists(st.sampled_from(batches), max_size=10))
    arrived = data.draw(st.permutations([*batches, *sent_again]))
    table = make()
    applied(logged(arrived), table, start())
    assert held(table) == newest(batches)


@MAKES
@settings(max_examples=60)
@given(plans=st.lists(writes, min_size=2, max_size=3), data=st.data())
def test_producers_that_write_at_the_same_time_leave_what_the_newest_wrote(
    make: Callable[[], EmbeddingTable], plans: list[list[tuple[Op, int]]], data: st.DataObject
) -> None:
    """Each keeps its own order, the broker mixes them as it likes, and versions come from one clock."""
    everything = versioned([write for plan in plans for write in plan])
    turns = [i for i, plan in enumerate(plans) for _ in plan]
    queues = []
    for plan in plans:
        queues.append(everything[: len(plan)])
        everything = everything[len(plan) :]
    batches = [batch for queue in queues for batch in queue]
    table = make()
    applied(logged([queues[i].pop(0) for i in data.draw(st.permutations(turns))]), table, start())
    assert held(table) == newest(batches)


@MAKES
@settings(max_examples=60)
@given(
    plan=st.lists(st.tuples(st.sampled_from(Op), st.sampled_from(KEYS)), max_size=20),
    jumps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
)
def test_a_log_that_is_read_again_from_anywhere_counts_once(
    make: Callable[[], EmbeddingTable], plan: list[tuple[Op, int]], jumps: list[tuple[int, int]]
) -> None:
    """Adds too: positions say what was applied."""
    records = logged([a_batch([key], float(value + 1), op=op) for value, (op, key) in enumerate(plan)])
    once, again = make(), make()
    applied(records, once, start())
    progress = start()
    reached = 0
    for begin, end in jumps:
        # A reader never skips: it goes back, and on from where it has been.
        applied(records[min(begin, reached) : end], again, progress)
        reached = max(reached, min(end, len(records)))
    applied(records[reached:], again, progress)
    assert held(again) == held(once)
    assert progress == _positions(records)


def _positions(records: Sequence[StreamRecord]) -> dict[int, Progress]:
    positions = start()
    for record in records:
        positions[record.partition] = Progress(record.offset + 1, 0, 1000)
    return positions


@settings(max_examples=60)
@given(
    plan=st.lists(st.tuples(st.sampled_from(Op), st.sampled_from(KEYS)), max_size=24),
    shards=st.lists(st.integers(1, N_PARTITIONS), min_size=1, max_size=6),
)
def test_partitions_that_move_between_shards_leave_the_same_rows(plan: list[tuple[Op, int]], shards: list[int]) -> None:
    """After every few records the partitions are divided anew, rows and positions together."""
    records = logged([a_batch([key], float(value + 1), op=op) for value, (op, key) in enumerate(plan)])
    whole = a_table()
    applied(records, whole, start())
    tables: Tables = [a_table()]
    progress = start()
    step = -(-len(records) // len(shards)) if records else 1
    for i, n_shards in enumerate(shards):
        tables = _divided(tables, n_shards)
        for shard, table in enumerate(tables):
            mine = partitions_of_shard(shard, N_PARTITIONS, n_shards)
            given_ = [record for record in records[: (i + 1) * step] if record.partition in mine]
            applied(given_, table, {p: progress[p] for p in mine})
    assert held(*tables) == held(whole)


def _divided(tables: Tables, n_shards: int) -> Tables:
    divided = []
    for shard in range(n_shards):
        table = a_table()
        generation = Generation(GENERATION, "r", "abc", 0, {"item": table}, {ITEM: table})
        for old in tables:
            assert fill_from_state(generation, {"item": old.export()}, Place(shard, n_shards, N_PARTITIONS))
        divided.append(table)
    return divided
