"""What every EmbeddingTable promises; runs on each implementation, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.table import Applied, EmbeddingTable, RowBatch, TopK
from tests.tables import DEFAULT, DIM, NUMPY_MAY_OVERFLOW, Factory, cpu_table, gpu_table, mapped_table, tiered_table

I64 = np.iinfo(np.int64)
ODD_KEYS = [I64.min, I64.max, 0, -1, 1, I64.min + 1, 2**32, -(2**32)]


@pytest.fixture(
    params=[cpu_table, mapped_table, tiered_table, pytest.param(gpu_table, marks=NUMPY_MAY_OVERFLOW)],
    ids=["cpu", "mapped", "tiered", "gpu"],
)
def make(request: pytest.FixtureRequest) -> Factory:
    factory: Factory = request.param
    return factory


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def write(
    table: EmbeddingTable, op: Op, keys: list[int], versions: list[int], value: float | list[float] = 0.0, *,
    versioned_rows: bool = False,
) -> Applied:  # fmt: skip
    values = value if isinstance(value, list) else [value] * len(keys)
    n = 0 if op is Op.DELETE else len(keys)
    rows = np.repeat(np.array(values[:n], np.float32)[:, None], DIM, axis=1)
    batch = RowBatch(op, keys_of(*keys), np.array(versions, np.uint64), rows, versioned_rows=versioned_rows)
    return table.apply(batch)


def value_of(table: EmbeddingTable, key: int) -> float | None:
    rows, found = table.lookup(keys_of(key))
    return float(rows[0, 0]) if found[0] else None


def test_a_missing_key_has_the_default_row_and_is_not_stored(make: Factory) -> None:
    table = make(8)
    rows, found = table.lookup(keys_of(*ODD_KEYS))
    assert not found.any()
    np.testing.assert_array_equal(rows, np.tile(DEFAULT, (len(ODD_KEYS), 1)))
    assert table.size == 0


def test_every_bit_pattern_is_a_key(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, ODD_KEYS, [1] * 8, [float(i) for i in range(8)])
    rows, found = table.lookup(keys_of(*ODD_KEYS))
    assert found.all()
    np.testing.assert_array_equal(rows[:, 0], np.arange(8))
    assert table.size == 8


def test_lookup_keeps_order_and_duplicates(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5, 6], [1, 1], [50.0, 60.0])
    rows, found = table.lookup(keys_of(6, 7, 5, 6))
    assert found.tolist() == [True, False, True, True]
    assert rows[:, 0].tolist() == [60.0, 9.0, 50.0, 60.0]


def test_lookup_of_nothing_is_nothing(make: Factory) -> None:
    rows, found = make(8).lookup(keys_of())
    assert rows.shape == (0, DIM)
    assert found.shape == (0,)


def test_rows_already_looked_up_do_not_change(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [1], 1.0)
    rows, _ = table.lookup(keys_of(5))
    write(table, Op.ASSIGN, [5], [2], 2.0)
    assert rows[0, 0] == 1.0


def test_an_older_or_equal_version_changes_nothing(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [7], 1.0)
    for version in (6, 7):
        done = write(table, Op.ASSIGN, [5], [version], 2.0)
        assert (done.applied, done.stale) == (0, 1)
    assert value_of(table, 5) == 1.0


def test_version_zero_enters_an_empty_place(make: Factory) -> None:
    table = make(8)
    assert write(table, Op.ASSIGN, [5], [0], 1.0).applied == 1


def test_versions_are_unsigned(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [2**64 - 1], 1.0)
    write(table, Op.ASSIGN, [5], [2**63], 2.0)
    assert value_of(table, 5) == 1.0


def test_inside_a_batch_the_greatest_version_wins_then_the_last_position(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5, 5, 5, 5], [1, 3, 3, 2], [1.0, 2.0, 3.0, 4.0])
    assert value_of(table, 5) == 3.0


def test_a_deleted_key_cannot_be_brought_back_by_an_older_assign(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [1], 1.0)
    write(table, Op.DELETE, [5], [10])
    assert value_of(table, 5) is None
    assert (table.size, table.tombstones) == (0, 1)
    write(table, Op.ASSIGN, [5], [9], 2.0)
    assert value_of(table, 5) is None
    write(table, Op.ASSIGN, [5], [11], 3.0)
    assert value_of(table, 5) == 3.0
    assert (table.size, table.tombstones) == (1, 0)


def test_a_delete_of_an_unknown_key_is_remembered(make: Factory) -> None:
    table = make(8)
    write(table, Op.DELETE, [5], [10])
    write(table, Op.ASSIGN, [5], [9], 2.0)
    assert value_of(table, 5) is None


def test_a_deleted_key_has_the_default_row(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [1], 1.0)
    write(table, Op.DELETE, [5], [2])
    rows, _ = table.lookup(keys_of(5))
    np.testing.assert_array_equal(rows[0], DEFAULT)


def test_add_begins_at_zero_and_not_at_the_default_row(make: Factory) -> None:
    table = make(8)
    write(table, Op.ADD, [5, 5], [1, 1], [2.0, 3.0])
    assert value_of(table, 5) == 5.0


def test_add_after_a_delete_begins_at_zero(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [1], 100.0)
    write(table, Op.DELETE, [5], [2])
    write(table, Op.ADD, [5], [3], 2.0)
    assert value_of(table, 5) == 2.0


def test_add_without_row_versions_always_counts_and_never_lowers_the_version(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [10], 1.0)
    assert write(table, Op.ADD, [5], [4], 2.0).applied == 1
    assert value_of(table, 5) == 3.0
    write(table, Op.ASSIGN, [5], [10], 50.0)
    assert value_of(table, 5) == 3.0


def test_add_with_row_versions_can_be_stale(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [10], 1.0)
    done = write(table, Op.ADD, [5, 5], [10, 11], [2.0, 4.0], versioned_rows=True)
    assert (done.applied, done.stale) == (1, 1)
    assert value_of(table, 5) == 5.0


def test_a_sum_that_is_not_finite_is_refused(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5], [1], 3e38)
    done = write(table, Op.ADD, [6, 5], [2, 2], [1.0, 3e38])
    assert done.overflow.tolist() == [1]
    assert value_of(table, 5) == pytest.approx(3e38)
    assert value_of(table, 6) == 1.0


def test_a_full_table_takes_known_keys_and_reports_the_others(make: Factory) -> None:
    table = make(2)
    write(table, Op.ASSIGN, [1, 2], [1, 1], 1.0)
    done = write(table, Op.ASSIGN, [3, 1, 4], [2, 2, 2], 2.0)
    assert done.full.tolist() == [0, 2]
    assert (done.applied, done.stale) == (1, 0)
    assert value_of(table, 1) == 2.0
    assert value_of(table, 3) is None
    assert table.size == table.capacity_rows == 2


@pytest.mark.parametrize("op", [Op.ADD, Op.DELETE])
def test_a_full_table_refuses_other_operations_on_new_keys_too(make: Factory, op: Op) -> None:
    table = make(1)
    write(table, Op.ASSIGN, [1], [1], 1.0)
    assert write(table, op, [2], [5]).full.tolist() == [0]


def test_topk_is_the_sorted_dot_product(make: Factory) -> None:
    table = make(300)
    rng = np.random.default_rng(0)
    keys = rng.integers(I64.min, I64.max, 200)
    rows = rng.standard_normal((200, DIM)).astype(np.float32)
    table.apply(RowBatch(Op.ASSIGN, keys, np.ones(200, np.uint64), rows))
    queries = rng.standard_normal((2, DIM)).astype(np.float32)
    for query, best in zip(queries, table.topk(queries, 20), strict=True):
        expected = np.argsort(-(rows @ query), kind="stable")[:20]
        assert best.keys.tolist() == keys[expected].tolist()
        np.testing.assert_allclose(best.scores, (rows @ query)[expected], rtol=1e-5)
        np.testing.assert_array_equal(best.rows, rows[expected])


def _top(table: EmbeddingTable, k: int, *exclude: int) -> TopK:
    return table.topk(np.ones((1, DIM), np.float32), k, (keys_of(*exclude),))[0]


def test_topk_leaves_out_deleted_and_excluded_keys(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [1, 2, 3, 4], [1] * 4, [-1.0, -2.0, -3.0, -4.0])
    write(table, Op.DELETE, [1], [2])
    assert _top(table, 2, 2, 77).keys.tolist() == [3, 4]


def test_topk_of_more_than_there_is_returns_what_there_is(make: Factory) -> None:
    table = make(8)
    assert _top(table, 5).keys.size == 0
    write(table, Op.ASSIGN, [1, 2], [1, 1], [1.0, 2.0])
    assert _top(table, 5).keys.tolist() == [2, 1]
    assert _top(table, 5, 1, 2).rows.shape == (0, DIM)


@pytest.mark.parametrize("k", [1, 3, 4, 6])
def test_topk_orders_equal_scores_by_key(make: Factory, k: int) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [5, -3, 9, I64.min, 7, 8], [1] * 6, [1.0, 1.0, 2.0, 1.0, -0.0, 0.0])
    assert _top(table, k).keys.tolist() == [9, I64.min, -3, 5, 7, 8][:k]


def test_a_score_that_is_not_finite_never_wins(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [1, 2, 3], [1] * 3, [3e38, -3e38, 1.0])
    assert _top(table, 3).keys.tolist() == [3]
    assert table.topk(np.full((1, DIM), np.nan, np.float32), 3)[0].keys.size == 0


def test_export_holds_everything_needed_to_build_the_table_again(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [1, 2, 3], [1, 2, 3], [1.0, 2.0, 3.0])
    write(table, Op.DELETE, [2], [9])
    got = table.export()
    state = {
        int(k): (int(v), bool(t), float(r[0]))
        for k, v, t, r in zip(got.keys, got.versions, got.tombstones, got.rows, strict=True)
    }
    assert state == {1: (1, False, 1.0), 2: (9, True, 0.0), 3: (3, False, 3.0)}


def test_export_since_a_version_holds_only_what_is_newer(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [1, 2, 3], [1, 2, 3], 1.0)
    assert sorted(table.export(2).keys.tolist()) == [2, 3]


def test_an_export_does_not_change_afterwards(make: Factory) -> None:
    table = make(8)
    write(table, Op.ASSIGN, [1], [1], 1.0)
    got = table.export()
    write(table, Op.ASSIGN, [1], [2], 2.0)
    assert got.rows[0, 0] == 1.0


def test_a_batch_whose_parts_do_not_fit_is_refused(make: Factory) -> None:
    batch = RowBatch(Op.ASSIGN, keys_of(1, 2), np.ones(2, np.uint64), np.zeros((2, DIM + 1), np.float32))
    with pytest.raises(ValueError, match="dim 3"):
        make(8).apply(batch)


def test_read_only_and_strided_arrays_are_welcome(make: Factory) -> None:
    table = make(8)
    keys, rows = np.arange(8, dtype=np.int64)[::2], np.ones((4, DIM), np.float32)
    rows.flags.writeable = False
    table.apply(RowBatch(Op.ASSIGN, keys, np.ones(8, np.uint64)[::2], rows))
    keys.flags.writeable = False
    assert table.lookup(keys)[1].all()


class Model:
    """The same promises, a row at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: dict[int, tuple[int, float | None]] = {}  # version, value or tombstone

    def apply(self, op: Op, rows: list[tuple[int, int, float]], versioned: bool) -> None:
        if op is not Op.ADD:
            newest: dict[int, tuple[int, float]] = {}
            for key, version, value in rows:
                if key not in newest or version >= newest[key][0]:
                    newest[key] = (version, value)
            # The table goes backwards: of the keys that find no room it keeps the last ones of the batch.
            ordered = dict.fromkeys(key for key, _, _ in reversed(rows))
            rows = [(key, *newest[key]) for key in ordered]
        for key, version, value in rows:
            self._write(op, key, version, value, versioned)

    def _write(self, op: Op, key: int, version: int, value: float, versioned: bool) -> None:
        if key not in self.entries and len(self.entries) >= self.capacity:
            return
        stored, old = self.entries.get(key, (-1, None))
        if op is Op.ADD:
            if not versioned or version > stored:
                self.entries[key] = (max(stored, version), (old or 0.0) + value)
        elif version > stored:
            self.entries[key] = (version, None if op is Op.DELETE else value)


Batches = list[tuple[Op, list[tuple[int, int, float]], bool]]
BATCHES = st.lists(
    st.tuples(
        st.sampled_from(list(Op)),
        st.lists(
            st.tuples(st.sampled_from([*ODD_KEYS, *range(2, 8)]), st.integers(0, 6), st.integers(-8, 8).map(float)),
            max_size=12,
        ),
        st.booleans(),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=200)
@given(capacity=st.integers(1, 16), batches=BATCHES)
def test_any_sequence_of_batches_leaves_what_a_dict_would_hold(capacity: int, batches: Batches) -> None:
    _compare_with_a_dict(cpu_table(capacity), capacity, batches)


@settings(deadline=None, max_examples=200)
@given(capacity=st.integers(1, 16), batches=BATCHES)
def test_any_sequence_of_batches_leaves_the_same_over_tiers(capacity: int, batches: Batches) -> None:
    _compare_with_a_dict(tiered_table(capacity), capacity, batches)


@NUMPY_MAY_OVERFLOW
@settings(deadline=None, max_examples=12)  # each takes a second in Triton's interpreter
@given(capacity=st.integers(1, 16), batches=BATCHES)
def test_any_sequence_of_batches_leaves_the_same_on_a_gpu(capacity: int, batches: Batches) -> None:
    _compare_with_a_dict(gpu_table(capacity), capacity, batches)


def _compare_with_a_dict(table: EmbeddingTable, capacity: int, batches: Batches) -> None:
    model = Model(capacity)
    for op, rows, versioned in batches:
        keys, versions, values = ([row[i] for row in rows] for i in range(3))
        done = write(table, op, keys, versions, values, versioned_rows=versioned)
        assert done.applied + done.stale + done.full.size + done.overflow.size == len(rows)
        model.apply(op, rows, versioned)
    live = {key: value for key, (_, value) in model.entries.items() if value is not None}
    got = table.export()
    assert dict(zip(got.keys.tolist(), got.versions.tolist(), strict=True)) == {
        key: version for key, (version, _) in model.entries.items()
    }
    assert {key: value_of(table, key) for key in ODD_KEYS if value_of(table, key) is not None} == {
        key: value for key, value in live.items() if key in ODD_KEYS
    }
    assert (table.size, table.tombstones) == (len(live), len(model.entries) - len(live))
    expected = sorted(live, key=lambda key: (-live[key], key))
    assert _top(table, 100).keys.tolist() == expected
    assert _top(table, 3).keys.tolist() == expected[:3]
