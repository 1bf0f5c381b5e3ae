"""A table that loses rows: the right ones, all told of, and finds the others, whatever was taken out between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.table import RowBatch, kernels_evicting
from param_server.table.evicting import EvictingTable, bytes_for, rows_within, warm
from param_server.table.tier import Entries
from tests.unit.param_server.captures import state_of

DIM = 2


def a_table(capacity_rows: int, policy: Policy | None = None) -> EvictingTable:
    default = np.full(DIM, 9.0, np.float32)
    return EvictingTable(dim=DIM, capacity_rows=capacity_rows, default_row=default, policy=policy or Policy("lru"))


def entries(keys: list[int], scores: list[int] | None = None, version: int = 1, dirty: bool = True) -> Entries:
    n = len(keys)
    rows = np.repeat(np.array(keys, np.float32)[:, None], DIM, axis=1).reshape(n, DIM)
    return Entries(
        np.array(keys, np.int64), np.full(n, version, np.uint64), np.zeros(n, np.bool_), rows,
        np.array(scores or [1] * n, np.uint32), np.full(n, dirty, np.bool_),
    )  # fmt: skip


def held(table: EvictingTable) -> list[int]:
    return sorted(table.export().keys.tolist())


def test_the_row_of_least_score_leaves_with_all_that_is_known_of_it() -> None:
    table = a_table(3)
    table.upsert(entries([1, 2, 3], [30, 10, 20], version=7, dirty=False), force=True)
    done = table.upsert(entries([4], [5]), force=True)
    gone = done.evicted
    assert (gone.keys.tolist(), gone.versions.tolist(), gone.rows.tolist()) == ([2], [7], [[2.0, 2.0]])
    assert (gone.scores.tolist(), gone.dirty.tolist(), gone.tombstones.tolist()) == ([10], [False], [False])
    assert held(table) == [1, 3, 4]


def test_without_force_a_row_is_not_displaced_by_one_that_is_used_less_or_as_much() -> None:
    table = a_table(2)
    table.upsert(entries([1, 2], [10, 20]), force=True)
    assert table.weakest() == 10
    done = table.upsert(entries([3, 4], [10, 11]), force=False)
    assert done.full.tolist() == [0]
    assert held(table) == [2, 4]


def test_a_pinned_row_stays() -> None:
    table = a_table(2, Policy("lfu"))
    table.upsert(entries([1, 2], [10, 20]), force=True)
    table.pin(np.array([1]))
    for key in range(3, 20):
        table.visit(np.array([key - 1]), key * 1000)
        table.upsert(entries([key], [key * 1000]), force=True)
    assert held(table) == [1, 19]


def test_rows_of_one_batch_do_not_displace_each_other_nor_what_the_batch_writes_to() -> None:
    table = a_table(2)
    table.upsert(entries([1, 2], [1, 50]), force=True)
    done = table.upsert(entries([1, 3, 4, 5], version=2), force=True)
    refused = [[1, 3, 4, 5][at] for at in done.full.tolist()]
    assert sorted(held(table) + done.evicted.keys.tolist() + refused) == [1, 2, 3, 4, 5]
    assert 1 in held(table)
    assert done.evicted.keys.tolist() == [2]


def test_a_visit_keeps_a_row_and_a_lookup_does_not() -> None:
    table = a_table(2)
    table.upsert(entries([1, 2], [10, 20]), force=True)
    assert table.visit(np.array([1, 77]), 100)[1:][1] == 1
    table.lookup(np.array([2]))
    table.upsert(entries([3], [30]), force=True)
    assert held(table) == [1, 3]


def test_what_was_changed_since_it_came_from_below_is_dirty() -> None:
    table = a_table(4)
    table.upsert(entries([1, 2], dirty=False), force=True)
    table.apply(RowBatch(Op.ADD, np.array([2]), np.array([1], np.uint64), np.ones((1, DIM), np.float32)))
    gone = table.remove(np.array([1, 2]))
    assert dict(zip(gone.keys.tolist(), gone.dirty.tolist(), strict=True)) == {1: False, 2: True}
    table.upsert(entries([1], dirty=False), force=True)
    table.soil()
    assert table.remove(np.array([1])).dirty.tolist() == [True]


def test_only_keys_that_are_held_are_written_by_apply() -> None:
    table = a_table(4)
    table.upsert(entries([1]), force=True)
    rows = np.full((2, DIM), 5.0, np.float32)
    done = table.apply(RowBatch(Op.ASSIGN, np.array([2, 1]), np.full(2, 9, np.uint64), rows))
    assert (done.applied, done.full.tolist()) == (1, [0])
    assert held(table) == [1]


def test_deleted_rows_can_be_taken_out_and_give_back_their_room() -> None:
    table = a_table(2)
    table.upsert(entries([1, 2]), force=True)
    table.apply(RowBatch(Op.DELETE, np.array([1]), np.array([5], np.uint64), np.empty((0, DIM), np.float32)))
    assert (table.size, table.tombstones) == (1, 1)
    buried = table.bury(np.array([1, 1, 2, 3]))
    assert (buried.keys.tolist(), buried.versions.tolist(), buried.tombstones.tolist()) == ([1], [5], [True])
    assert (table.size, table.tombstones) == (1, 0)
    assert table.upsert(entries([7]), force=False).full.size == 0


def test_the_hottest_rows_come_first_and_all_of_them_are_hot() -> None:
    table = a_table(20_000)
    scores = np.random.default_rng(0).permutation(20_000)
    table.upsert(entries(list(range(20_000)), scores.tolist()), force=True)
    keys, got = table.hottest(100)
    assert 50 <= keys.size <= 100
    assert got.tolist() == sorted(got.tolist(), reverse=True)
    assert got.min() >= 20_000 - 400
    np.testing.assert_array_equal(scores[keys], got)


def test_expired_rows_are_all_found_by_and_by() -> None:
    table = a_table(10_000)
    table.upsert(entries(list(range(10_000)), [i % 2 * 100 for i in range(10_000)]), force=True)
    gone = [key for _ in range(3) for key in table.expire(50).keys.tolist()]
    assert sorted(gone) == list(range(0, 10_000, 2))


SOME = st.lists(st.integers(0, 25), max_size=8, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["upsert", "remove", "visit"]), SOME), max_size=40)


@settings(deadline=None, max_examples=300)
@given(capacity=st.integers(1, 12), steps=STEPS)
def test_nothing_is_lost_or_found_twice_whatever_comes_and_goes(
    capacity: int, steps: list[tuple[str, list[int]]]
) -> None:
    table = a_table(capacity)
    model: set[int] = set()
    for i, (name, keys) in enumerate(steps):
        if name == "upsert":
            done = table.upsert(entries(keys, [i + 1] * len(keys), version=i + 1), force=True)
            entered = set(keys) - {keys[at] for at in done.full.tolist()}
            gone = set(done.evicted.keys.tolist())
            assert gone <= model - set(keys)
            model = (model | entered) - gone
        elif name == "remove":
            assert set(table.remove(np.array(keys, np.int64)).keys.tolist()) == model & set(keys)
            model -= set(keys)
        else:
            _, found, n = table.visit(np.array(keys, np.int64), i + 1)
            assert found.tolist() == [key in model for key in keys]
            assert n == int(found.sum())
        every = np.arange(26)
        rows, found = table.lookup(every)
        assert set(every[found].tolist()) == model
        assert rows[found, 0].tolist() == every[found].tolist()
        assert table.size == len(model) <= capacity
    assert set(held(table)) == model


@settings(deadline=None, max_examples=300)
@given(capacity=st.integers(1, 10), before=STEPS, after=STEPS, piece=st.integers(1, 4))
def test_a_capture_is_the_table_as_it_was_whatever_happens_meanwhile(
    capacity: int, before: list[tuple[str, list[int]]], after: list[tuple[str, list[int]]], piece: int
) -> None:
    table = a_table(capacity)
    version = 0

    def do(name: str, keys: list[int]) -> None:
        nonlocal version
        version += 1
        at = np.array(keys, np.int64)
        if name == "upsert":
            table.upsert(entries(keys, [version] * len(keys), version), force=True)
        elif name == "remove":
            table.remove(at)
        else:
            rows = np.full((at.size, DIM), version, np.float32)
            table.apply(RowBatch(Op.ASSIGN, at, np.full(at.size, version, np.uint64), rows))

    for step in before:
        do(*step)
    expected = state_of([table.export()])
    capture = table.capture_all()
    pieces = []
    for step in after:
        do(*step)
        pieces.append(capture.take(piece))
    while (last := capture.take(piece)) is not None:
        pieces.append(last)
    got = [part for part in pieces if part is not None]
    assert state_of(got) == expected
    assert sum(part.keys.size for part in got) == len(expected)


def test_after_warm_up_nothing_is_compiled_whatever_the_arrays_look_like() -> None:
    warm()
    names = ("visit", "upsert", "remove", "about_to_change", "tombstones", "below", "weakest", "set_score")
    kernels = [getattr(kernels_evicting, name) for name in names]
    compiled = [len(kernel.signatures) for kernel in kernels]
    assert compiled == [1] * len(kernels)
    table = a_table(4, Policy("lfu"))
    some = entries(list(range(10))).take(slice(0, None, 2))
    some.keys.flags.writeable = False
    table.upsert(some, force=False)
    table.capture_all()
    table.visit(some.keys, 5)
    table.pin(some.keys[:1])
    table.apply(RowBatch(Op.DELETE, some.keys, some.versions + np.uint64(1), some.rows[:0]))
    table.bury(some.keys)
    table.weakest()
    table.expire(3)
    table.remove(some.keys)
    assert [len(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.parametrize("budget", [1, 1000, 10**6, 10**8])
def test_the_largest_table_within_a_budget_is_no_larger_and_hardly_smaller(budget: int) -> None:
    rows = rows_within(budget, 64)
    assert bytes_for(rows, 64) <= budget or rows == 1
    assert bytes_for(rows + 10, 64) > budget


@pytest.mark.parametrize(("capacity_rows", "default_dim"), [(0, 2), (2**31, 2), (8, 3)])
def test_an_impossible_table_is_refused(capacity_rows: int, default_dim: int) -> None:
    default = np.zeros(default_dim, np.float32)
    with pytest.raises(ValueError, match=r"capacity_rows|default_row"):
        EvictingTable(dim=2, capacity_rows=capacity_rows, default_row=default, policy=Policy())
