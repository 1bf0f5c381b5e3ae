"""What a GPU table has beyond the contract: types, collisions, eviction, arenas, batches staged ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import RowBatch
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton

if TYPE_CHECKING:
    from param_server.table.gpu import GpuTable

pytestmark = NUMPY_MAY_OVERFLOW
I64 = np.iinfo(np.int64)
BUCKETS = 1031  # the fewest: every small table has as many


def make(*, dim: int = 4, capacity_rows: int = 64, dtype: str = "f32", evicting: bool = False) -> GpuTable:
    need_triton()
    from param_server.table.gpu import GpuTable

    default = np.full(dim, 9.0, np.float32)
    return GpuTable(dim=dim, capacity_rows=capacity_rows, default_row=default, dtype=dtype, evicting=evicting)


def batch(
    op: Op, keys: np.ndarray, version: int | np.ndarray, rows: np.ndarray | None = None, dim: int = 4
) -> RowBatch:
    versions = np.broadcast_to(np.asarray(version, np.uint64), keys.shape)
    if rows is None:
        rows = np.repeat((keys % 97).astype(np.float32)[:, None], dim, axis=1)
    return RowBatch(op, keys, versions, rows[:0] if op is Op.DELETE else rows)


def homes(keys: np.ndarray) -> np.ndarray:
    """Home bucket of each key, computed a second time."""
    h = keys.view(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
    h = h ^ (h >> np.uint64(33))
    return ((h >> np.uint64(32)) * np.uint64(BUCKETS) >> np.uint64(32)).astype(np.int64)


def seconds(keys: np.ndarray) -> np.ndarray:
    """The bucket one step from home."""
    h = keys.view(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
    h = h ^ (h >> np.uint64(33))
    step = 1 + ((h & np.uint64(0xFFFFFFFF)) * np.uint64(BUCKETS - 1) >> np.uint64(32)).astype(np.int64)
    return (homes(keys) + step) % BUCKETS


def hops(table: GpuTable) -> dict[int, int]:
    """How far from home each key lies."""
    from param_server.table.gpu_arrays import keys_of

    words = table.arrays.words
    slots = (words >> 62 != 0).nonzero()[:, 0]
    keys = keys_of(words[slots], slots, table.arrays.n_buckets)
    return dict(zip(keys.tolist(), (words[slots] >> 54 & 255).tolist(), strict=True))


def neighbours(n: int, bucket: int = 7, seed: int = 0) -> np.ndarray:
    """Keys that share one home bucket."""
    keys = np.random.default_rng(seed).integers(I64.min, I64.max, (3 * n + 20) * BUCKETS)
    return keys[homes(keys) == bucket][:n]


@pytest.mark.parametrize("dim", [4, 20, 64, 100, 512])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_rows_of_every_type_and_width_come_back(dtype: str, dim: int) -> None:
    table = make(dim=dim, dtype=dtype)
    rng = np.random.default_rng(1)
    keys = rng.integers(I64.min, I64.max, 50)
    rows = rng.standard_normal((50, dim)).astype(np.float32)
    table.apply(batch(Op.ASSIGN, keys, 1, rows))
    got, found = table.lookup(np.r_[keys, [5]])
    assert found.tolist() == [True] * 50 + [False]
    assert (got[50] == 9.0).all()
    largest = np.abs(rows).max(1, keepdims=True)
    # Triton's interpreter cuts bf16 off where a GPU rounds.
    error = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-7, "i8": 0.5 / 127}[dtype]
    assert (np.abs(got[:50] - rows) <= error * largest * 1.001).all()


def test_a_number_too_large_for_the_type_becomes_its_largest() -> None:
    table = make(dtype="f16")
    table.apply(batch(Op.ASSIGN, np.array([1, 2]), 1, np.array([[1e9] * 4, [-1e9] * 4], np.float32)))
    assert table.lookup(np.array([1, 2]))[0][:, 0].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i8"])
def test_sums_of_narrow_rows_are_made_in_f32(dtype: str) -> None:
    table = make(dtype=dtype)
    keys = np.array([3, 3, 3])
    table.apply(batch(Op.ADD, keys, 1, np.array([[1.0] * 4, [0.5] * 4, [2.5] * 4], np.float32)))
    np.testing.assert_allclose(table.lookup(keys[:1])[0], 4.0, rtol=1e-6)


def test_keys_of_one_home_bucket_spread_and_are_all_found() -> None:
    table = make(capacity_rows=500)
    keys = neighbours(100)
    assert table.apply(batch(Op.ASSIGN, keys, 1)).applied == 100
    absent = neighbours(40, seed=3)
    rows, found = table.lookup(np.r_[keys, absent])
    assert found.tolist() == [True] * 100 + [False] * 40
    np.testing.assert_array_equal(rows[:100, 0], (keys % 97).astype(np.float32))
    table.apply(batch(Op.DELETE, keys[::2], 2))
    assert table.lookup(keys)[1].tolist() == [False, True] * 50
    assert table.apply(batch(Op.ASSIGN, keys, 3)).applied == 100
    assert (table.size, table.tombstones) == (100, 0)


def test_keys_are_read_back_from_wherever_they_lie() -> None:
    table = make(capacity_rows=2000)
    keys = np.r_[neighbours(60, bucket=0), neighbours(60, bucket=BUCKETS - 1), [I64.min, I64.max, 0, -1]]
    keys = np.unique(np.r_[keys, np.random.default_rng(2).integers(I64.min, I64.max, 500)])
    table.apply(batch(Op.ASSIGN, keys, 1))
    assert np.sort(table.export().keys).tolist() == keys.tolist()


def test_a_key_far_from_home_takes_the_place_of_one_that_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    from param_server.table import gpu_write

    table = make(capacity_rows=500)
    many = np.random.default_rng(4).integers(I64.min, I64.max, 400 * BUCKETS)
    home = many[homes(many) == 7]
    bucket = int(np.bincount(seconds(home), minlength=BUCKETS).argmax())
    far = home[seconds(home) == bucket][:1]
    at_home = home[seconds(home) != bucket][:8]
    second = many[homes(many) == bucket][:8]
    table.apply(batch(Op.ASSIGN, np.r_[at_home, second], 3))
    table.apply(batch(Op.ASSIGN, far, 4))
    assert hops(table)[int(far[0])] == 2
    # The same again, tidied.
    table = make(capacity_rows=500)
    monkeypatch.setattr(gpu_write, "_TIDY_LOAD", 0.0)
    table.apply(batch(Op.ASSIGN, np.r_[at_home, second], 3))
    table.apply(batch(Op.ASSIGN, np.r_[far, far], 4))
    distance = hops(table)
    assert distance[int(far[0])] == 0
    assert sorted(distance[int(key)] for key in at_home) == [0] * 7 + [1]
    everyone = np.r_[at_home, second, far]
    rows, found = table.lookup(everyone)
    assert found.all()
    np.testing.assert_array_equal(rows[:, 0], (everyone % 97).astype(np.float32))
    got = table.export()
    assert dict(zip(got.keys.tolist(), got.versions.tolist(), strict=True)) == {
        int(key): 4 if key == far[0] else 3 for key in everyone
    }
    # The hole it left is no key, hides none behind it, and is taken by the next.
    late = home[9:20]
    assert table.apply(batch(Op.ASSIGN, late, 5)).applied == 11
    assert table.lookup(np.r_[everyone, late])[1].all()
    assert table.size == 28


def test_two_new_keys_twice_in_a_batch_take_two_places() -> None:
    table = make()
    keys = np.array([5, 6, 5, 6, 5])
    done = table.apply(batch(Op.ASSIGN, keys, 1, np.arange(20, dtype=np.float32).reshape(5, 4)))
    assert (done.applied, done.stale, table.size) == (2, 3, 2)
    assert table.lookup(np.array([5, 6]))[0][:, 0].tolist() == [16.0, 12.0]


def test_versions_out_of_order_inside_a_batch_are_put_in_order() -> None:
    table = make()
    keys = np.array([5, 6, 5, 6])
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    table.apply(batch(Op.ASSIGN, keys, np.array([9, 1, 3, 2], np.uint64), rows))
    assert table.lookup(np.array([5, 6]))[0][:, 0].tolist() == [0.0, 12.0]


def test_marks_start_again_before_they_overflow() -> None:
    table = make()
    table.apply(batch(Op.ASSIGN, np.array([1]), 1))
    table.writer._next_mark = 2**31 - 2
    for version in (2, 3, 4):
        done = table.apply(batch(Op.ASSIGN, np.array([1, 2]), version, np.full((2, 4), version, np.float32)))
        assert done.applied == 2
    assert table.lookup(np.array([1]))[0][0, 0] == 4.0


def test_a_batch_is_written_when_the_owner_says_so() -> None:
    table = make()
    staged = table.writer.stage(batch(Op.ASSIGN, np.array([1]), 1))
    assert not table.lookup(np.array([1]))[1][0]
    assert table.writer.write(staged).applied == 1
    assert table.lookup(np.array([1]))[1][0]


def test_batches_filled_ahead_are_written_one_a_step_in_their_order() -> None:
    need_triton()
    from param_server.table.gpu_staging import Staging

    table = make()
    staging = Staging(table.writer, places=3, most_rows=4)
    for version in (1, 2):
        assert staging.fill(batch(Op.ASSIGN, np.array([1, 2]), version, np.full((2, 4), version, np.float32)))
    assert staging.fill(batch(Op.DELETE, np.array([2, 2, 1]), np.array([9, 8, 1], np.uint64)))
    assert not staging.fill(batch(Op.ASSIGN, np.array([3]), 1), timeout_s=0.01)
    seen = []
    while table.tombstones == 0:
        done = staging.step()
        if done is not None:
            rows, found = table.lookup(np.array([1, 2]))
            seen.append((done.applied, rows[:, 0].tolist(), found.tolist()))
    assert seen == [(2, [1.0] * 2, [True] * 2), (2, [2.0] * 2, [True] * 2), (1, [2.0, 9.0], [True, False])]
    assert staging.step() is None
    with pytest.raises(ValueError, match="a place has 4"):
        staging.fill(batch(Op.ASSIGN, np.arange(5), 1))
    with pytest.raises(ValueError, match="dim 4"):
        staging.fill(RowBatch(Op.ASSIGN, np.array([1]), np.ones(1, np.uint64), np.ones((1, 3), np.float32)))
    for _ in range(3):  # what was refused holds no place
        assert staging.fill(batch(Op.ASSIGN, np.array([3]), 1), timeout_s=0.01)


def test_warming_up_changes_nothing_and_compiles_lookup_and_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    from param_server.table import gpu, gpu_capture, gpu_topk

    launched: set[str] = set()
    homes = {"lookup_kernel": gpu, "best_kernel": gpu_topk, "score_kernel": gpu_topk, "gather_kernel": gpu_capture}
    for name, home in homes.items():
        kernel = getattr(home, name)

        class Noted:
            def __getitem__(self, grid: object, name: str = name, kernel: object = kernel) -> object:
                launched.add(name)
                return kernel[grid]  # type: ignore[index]

        monkeypatch.setattr(home, name, Noted())
    for evicting in (False, True):
        table = make(evicting=evicting)
        launched.clear()
        table.warm()
        assert launched == homes.keys()
        assert (table.size, table.tombstones, table.export().keys.size) == (0, 0, 0)


def test_tables_of_one_arena_do_not_see_each_other() -> None:
    need_triton()
    from param_server.table.gpu import GpuTable
    from param_server.table.gpu_arrays import buckets_for, carve
    from param_server.table.gpu_host import device_of_process

    parts = carve([buckets_for(1), buckets_for(9000)], 4, "f32", device_of_process())
    one, other = (
        GpuTable(dim=4, capacity_rows=64, default_row=np.zeros(4, np.float32), arrays=arrays) for arrays in parts
    )
    keys = neighbours(30)
    one.apply(batch(Op.ASSIGN, keys, 1))
    other.apply(batch(Op.ASSIGN, keys[:3], 1, np.ones((3, 4), np.float32)))
    assert one.lookup(keys)[1].all()
    np.testing.assert_array_equal(one.lookup(keys)[0][:, 0], (keys % 97).astype(np.float32))
    assert other.lookup(keys)[1].sum() == 3
    assert other.size == 3


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_topk_multiplies_by_the_whole_query(dtype: str) -> None:
    table = make(dim=64, capacity_rows=400, dtype=dtype)
    rng = np.random.default_rng(5)
    keys = np.arange(300)
    table.apply(batch(Op.ASSIGN, keys, 1, rng.standard_normal((300, 64)).astype(np.float32)))
    n = 9 if dtype == "f32" else 2  # nine take two passes
    queries = (rng.standard_normal((n, 64)) * 10.0 ** rng.integers(-3, 6, (n, 1))).astype(np.float32)
    rows, _ = table.lookup(keys)
    for query, best in zip(queries, table.topk(queries, 25), strict=True):
        exact = rows.astype(np.float64) @ query.astype(np.float64)
        expected = np.sort(exact)[::-1][:25]
        np.testing.assert_allclose(best.scores, expected, rtol=2e-6, atol=2e-6 * np.abs(exact).max())
        np.testing.assert_array_equal(best.rows, rows[best.keys])


def test_topk_lets_the_key_decide_among_rows_of_many_groups() -> None:
    table = make(capacity_rows=600)
    keys = np.random.default_rng(6).permutation(500) - 250
    table.apply(batch(Op.ASSIGN, keys, 1, np.ones((500, 4), np.float32)))
    assert table.topk(np.ones((1, 4), np.float32), 40)[0].keys.tolist() == list(range(-250, -210))


def upsert(table: GpuTable, keys: list[int] | np.ndarray, version: int, score: int) -> tuple[list[int], list[int]]:
    """Keys that left, and positions that found no room."""
    names = np.asarray(keys, np.int64)
    done, gone = table.upsert(batch(Op.ASSIGN, names, version), np.full(names.size, score, np.uint32))
    return gone.keys.tolist(), done.full.tolist()


def test_the_row_of_least_score_leaves_with_its_version() -> None:
    table = make(evicting=True)
    keys = neighbours(10)
    for i in range(8):
        assert upsert(table, keys[i : i + 1], i + 1, 100 - i) == ([], [])
    done, gone = table.upsert(batch(Op.ASSIGN, keys[8:9], 50), np.array([200], np.uint32))
    assert done.applied == 1
    assert (gone.keys.tolist(), gone.versions.tolist(), gone.tombstones.tolist()) == ([keys[7]], [8], [False])
    np.testing.assert_array_equal(gone.rows, np.full((1, 4), keys[7] % 97, np.float32))
    assert table.lookup(keys[:9])[1].tolist() == [True] * 7 + [False, True]
    assert table.size == 8


def test_a_touched_row_outlives_the_others() -> None:
    table = make(evicting=True)
    keys = neighbours(9)
    upsert(table, keys[:8], 1, 5)
    table.touch(np.r_[keys[:7], keys[8]], 6)
    assert upsert(table, keys[8:], 2, 7) == ([keys[7]], [])


def test_a_pinned_row_does_not_leave() -> None:
    table = make(evicting=True)
    keys = neighbours(9)
    upsert(table, keys[:8], 1, 2**32 - 1)
    assert upsert(table, keys[8:], 2, 7) == ([], [0])
    assert table.lookup(keys[:8])[1].all()


def test_a_batch_never_pushes_out_its_own_rows() -> None:
    table = make(evicting=True)
    keys = neighbours(12)
    upsert(table, keys[:8], 1, 5)
    # Two of the batch are resident: the other six of the bucket must go, and two of the ten find no room.
    gone, full = upsert(table, keys[2:], 2, 1)
    assert len(full) == 2
    assert sorted(gone) == sorted(keys[:2].tolist()) if len(gone) == 2 else len(gone) <= 6
    assert table.size == 8


def test_a_key_twice_in_an_upsert_pushes_out_one_row() -> None:
    table = make(evicting=True)
    keys = neighbours(9)
    upsert(table, keys[:8], 1, 5)
    gone, full = upsert(table, [keys[8], keys[8]], 2, 6)
    assert (len(gone), full) == (1, [])
    assert table.size == 8


def test_a_tombstone_leaves_as_one() -> None:
    table = make(evicting=True)
    keys = neighbours(9)
    upsert(table, keys[:8], 1, 5)
    table.touch(keys[1:8], 9)
    table.apply(batch(Op.DELETE, keys[:1], 7))
    _, gone = table.upsert(batch(Op.ASSIGN, keys[8:], 8), np.array([9], np.uint32))
    assert (gone.keys.tolist(), gone.versions.tolist(), gone.tombstones.tolist()) == ([keys[0]], [7], [True])
    assert (gone.rows == 0).all()


def test_apply_to_an_evicting_table_writes_residents_and_reports_the_rest() -> None:
    table = make(evicting=True)
    upsert(table, [1, 2], 1, 5)
    done = table.apply(batch(Op.ASSIGN, np.array([3, 1, 2]), 2))
    assert (done.applied, done.full.tolist()) == (2, [0])
    assert not table.lookup(np.array([3]))[1][0]


@settings(deadline=None, max_examples=8)  # each takes a second in Triton's interpreter
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 19), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=14),
        min_size=1,
        max_size=5,
    )
)
def test_what_an_upsert_does_not_keep_it_returns(batches: list[list[tuple[int, int, int]]]) -> None:
    """No row is lost or made up: table and evicted rows together are what a dict of the hot tier would hold."""
    table = make(evicting=True)
    names = neighbours(20)
    hot: dict[int, tuple[int, float]] = {}
    for number, rows in enumerate(batches):
        keys = names[[row[0] for row in rows]]
        versions = np.array([row[1] for row in rows], np.uint64)
        values = np.array([[number * 100.0 + i] * 4 for i in range(len(rows))], np.float32)
        scores = np.array([row[2] for row in rows], np.uint32)
        done, gone = table.upsert(batch(Op.ASSIGN, keys, versions, values), scores)
        assert done.applied + done.stale + done.full.size == len(rows)
        for key, version, row in zip(gone.keys.tolist(), gone.versions.tolist(), gone.rows[:, 0], strict=True):
            assert hot.pop(key) == (version, row)
        left_out = set(keys[done.full].tolist())
        assert not left_out & hot.keys()
        # A resident whose write was stale may be pushed out by the same batch; it does not come back by that write.
        left_out |= set(gone.keys.tolist())
        newest = {int(keys[i]): i for i in np.argsort(versions, kind="stable")}
        for key, i in newest.items():
            if key not in left_out and (key not in hot or versions[i] > hot[key][0]):
                hot[key] = (int(versions[i]), float(values[i, 0]))
        assert table.size == len(hot) <= 8
    got = table.export()
    held = zip(got.keys.tolist(), got.versions.tolist(), got.rows[:, 0].tolist(), strict=True)
    assert {key: (version, value) for key, version, value in held} == hot
