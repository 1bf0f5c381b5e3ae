"""The hot tier on a GPU keeps the rules of one in host memory, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.eviction import Policy
from param_server.table import RowBatch
from param_server.table.evicting import EvictingTable
from param_server.table.tier import Entries
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton
from tests.unit.param_server.captures import state_of
from tests.unit.param_server.table.test_gpu import neighbours

if TYPE_CHECKING:
    from param_server.table.gpu_tier import GpuTierTable

pytestmark = NUMPY_MAY_OVERFLOW
DIM = 2
# Keys of one bucket: it holds eight of them.
NAMES = neighbours(26)


def a_table(policy: Policy | None = None) -> GpuTierTable:
    need_triton()
    from param_server.table.gpu_tier import GpuTierTable

    return GpuTierTable(dim=DIM, slots=8, default_row=np.full(DIM, 9.0, np.float32), policy=policy or Policy("lru"))


def entries(which: list[int], scores: list[int] | None = None, version: int = 1, dirty: bool = True) -> Entries:
    n = len(which)
    rows = np.repeat(np.array(which, np.float32)[:, None], DIM, axis=1).reshape(n, DIM)
    return Entries(
        NAMES[which], np.full(n, version, np.uint64), np.zeros(n, np.bool_), rows,
        np.array(scores or [1] * n, np.uint32), np.full(n, dirty, np.bool_),
    )  # fmt: skip


def numbers(keys: np.ndarray) -> list[int]:
    return sorted(NAMES.tolist().index(key) for key in keys.tolist())


def held(table: GpuTierTable) -> list[int]:
    return numbers(table.export().keys)


def test_the_row_of_least_score_leaves_with_all_that_is_known_of_it() -> None:
    table = a_table()
    table.upsert(entries(list(range(8)), [30, 10, *range(40, 46)], version=7, dirty=False), force=True)
    gone = table.upsert(entries([9], [5]), force=True).evicted
    assert (numbers(gone.keys), gone.versions.tolist(), gone.rows.tolist()) == ([1], [7], [[1.0, 1.0]])
    assert (gone.scores.tolist(), gone.dirty.tolist(), gone.tombstones.tolist()) == ([10], [False], [False])
    assert held(table) == [0, *range(2, 8), 9]


def test_without_force_a_row_is_not_displaced_by_one_that_is_used_less_or_as_much() -> None:
    table = a_table()
    table.upsert(entries(list(range(8)), [10 * i for i in range(1, 9)]), force=True)
    assert table.upsert(entries([8], [10]), force=False).full.tolist() == [0]
    done = table.upsert(entries([8, 9], [11, 9]), force=False)
    assert (done.full.tolist(), numbers(done.evicted.keys)) == ([1], [0])
    assert held(table) == list(range(1, 9))


def test_a_pinned_row_stays() -> None:
    table = a_table(Policy("lfu"))
    table.upsert(entries(list(range(8)), [10] * 8), force=True)
    table.pin(NAMES[:7])
    for i in range(8, 12):
        table.visit(NAMES[:7], 50_000 * i)
        table.upsert(entries([i], [50_000 * i]), force=True)
    assert held(table) == [*range(7), 11]


def test_a_visit_keeps_a_row_and_a_lookup_does_not() -> None:
    table = a_table()
    table.upsert(entries(list(range(8)), [10, 20, *range(30, 36)]), force=True)
    assert table.visit(np.r_[NAMES[0], NAMES[20]], 100)[1:] == (pytest.approx([True, False]), 1)
    table.lookup(NAMES[1:2])
    table.upsert(entries([8], [40]), force=True)
    assert held(table) == [0, *range(2, 9)]


@settings(deadline=None, max_examples=3)
@given(
    kind=st.sampled_from(["lru", "lfu", "ttl"]),
    visits=st.lists(st.tuples(st.integers(0, 2**32 - 2), st.lists(st.integers(0, 5), unique=True)), max_size=5),
)
def test_uses_are_scored_as_in_host_memory(kind: str, visits: list[tuple[int, list[int]]]) -> None:
    table, model = a_table(Policy(kind)), EvictingTable(
        dim=DIM, capacity_rows=8, default_row=np.zeros(DIM, np.float32), policy=Policy(kind)
    )  # fmt: skip
    for one in (table, model):
        one.upsert(entries(list(range(6)), [1, 2**16, 2**31, 2**32 - 1, 0, 2**32 - 2]), force=True)
        for tick, which in sorted(visits):
            one.visit(NAMES[which], tick)
    (keys, scores), (expected_keys, expected) = table.hottest(8), model.hottest(8)
    assert dict(zip(keys.tolist(), scores.tolist(), strict=True)) == dict(
        zip(expected_keys.tolist(), expected.tolist(), strict=True)
    )
    assert scores.tolist() == expected.tolist()


def test_what_was_changed_since_it_came_from_below_is_dirty() -> None:
    table = a_table()
    table.upsert(entries([1, 2, 3], dirty=False), force=True)
    table.apply(RowBatch(Op.ADD, NAMES[2:3], np.array([1], np.uint64), np.ones((1, DIM), np.float32)))
    gone = table.remove(NAMES[1:3])
    assert dict(zip(numbers(gone.keys), gone.dirty[np.argsort(gone.rows[:, 0])].tolist(), strict=True)) == {
        1: False,
        2: True,
    }
    table.soil()
    assert table.remove(NAMES[3:4]).dirty.tolist() == [True]


def test_deleted_rows_can_be_taken_out_and_give_back_their_room() -> None:
    table = a_table()
    table.upsert(entries(list(range(8))), force=True)
    table.apply(RowBatch(Op.DELETE, NAMES[1:2], np.array([5], np.uint64), np.empty((0, DIM), np.float32)))
    assert (table.size, table.tombstones) == (7, 1)
    buried = table.bury(NAMES[[1, 1, 2, 3]])
    assert (numbers(buried.keys), buried.versions.tolist(), buried.tombstones.tolist()) == ([1], [5], [True])
    assert (table.size, table.tombstones) == (7, 0)
    assert table.upsert(entries([9]), force=False).full.size == 0


def test_tombstones_from_elsewhere_stay_below() -> None:
    table = a_table()
    some = entries([1, 2, 3])
    dead = Entries(
        some.keys, some.versions, np.array([False, True, False]), some.rows, some.scores, some.dirty
    )  # fmt: skip
    assert table.upsert(dead, force=True).full.tolist() == [1]
    assert held(table) == [1, 3]


def test_the_hottest_rows_come_first_and_all_of_them_are_hot() -> None:
    need_triton()
    from param_server.table.gpu_tier import GpuTierTable

    table = GpuTierTable(dim=1, slots=9000, default_row=np.zeros(1, np.float32), policy=Policy())
    keys = np.arange(4000)
    scores = np.random.default_rng(0).permutation(4000).astype(np.uint32)
    no = np.zeros(4000, np.bool_)
    table.upsert(Entries(keys, no.astype(np.uint64), no, np.ones((4000, 1), np.float32), scores, no), force=True)
    assert table.weakest() == -1
    found, got = table.hottest(100)
    assert 50 <= found.size <= 100
    assert got.tolist() == sorted(got.tolist(), reverse=True)
    assert got.min() >= 4000 - 400
    np.testing.assert_array_equal(scores[found], got)


def test_expired_rows_are_all_found_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table(Policy("ttl"))
    from param_server.table import gpu_tier

    monkeypatch.setattr(gpu_tier, "_EXPIRE_AT_ONCE", 4096)
    table.upsert(entries(list(range(6)), [0, 100] * 3), force=True)
    gone = [number for _ in range(3) for number in numbers(table.expire(50).keys)]
    assert gone == [0, 2, 4]


SOME = st.lists(st.integers(0, 25), max_size=8, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["upsert", "remove", "visit"]), SOME), max_size=8)


@settings(deadline=None, max_examples=3)  # each takes a second in Triton's interpreter
@given(steps=STEPS)
def test_nothing_is_lost_or_found_twice_whatever_comes_and_goes(steps: list[tuple[str, list[int]]]) -> None:
    table = a_table()
    model: set[int] = set()
    for i, (name, which) in enumerate(steps):
        if name == "upsert":
            done = table.upsert(entries(which, [i + 1] * len(which), version=i + 1), force=True)
            entered = set(which) - {which[at] for at in done.full.tolist()}
            gone = set(numbers(done.evicted.keys))
            assert gone <= model - set(which)
            model = (model | entered) - gone
        elif name == "remove":
            assert set(numbers(table.remove(NAMES[which]).keys)) == model & set(which)
            model -= set(which)
        else:
            _, found, n = table.visit(NAMES[which], i + 1)
            assert found.tolist() == [number in model for number in which]
            assert n == int(found.sum())
        rows, found = table.lookup(NAMES)
        assert set(np.flatnonzero(found).tolist()) == model
        assert rows[found, 0].tolist() == np.flatnonzero(found).tolist()
        assert table.size == len(model) <= 8


@settings(deadline=None, max_examples=3)
@given(before=STEPS, after=STEPS, piece=st.integers(1, 2))
def test_a_capture_is_the_table_as_it_was_whatever_happens_meanwhile(
    before: list[tuple[str, list[int]]], after: list[tuple[str, list[int]]], piece: int
) -> None:
    table = a_table()
    version = 0

    def do(name: str, which: list[int]) -> None:
        nonlocal version
        version += 1
        if name == "upsert":
            table.upsert(entries(which, [version] * len(which), version), force=True)
        elif name == "remove":
            table.remove(NAMES[which])
        else:
            rows = np.full((len(which), DIM), version, np.float32)
            table.apply(RowBatch(Op.ASSIGN, NAMES[which], np.full(len(which), version, np.uint64), rows))

    for step in before:
        do(*step)
    expected = state_of([table.export()])
    capture = table.capture_all()
    pieces = []
    for i, step in enumerate(after):
        do(*step)
        if i % 2:
            pieces.append(capture.take(piece))
    while (last := capture.take(piece)) is not None:
        pieces.append(last)
    got = [part for part in pieces if part is not None]
    assert state_of(got) == expected
    assert sum(part.keys.size for part in got) == len(expected)


def test_warming_up_changes_nothing() -> None:
    table = a_table()
    table.warm()
    assert (table.size, table.tombstones, table.export().keys.size) == (0, 0, 0)
