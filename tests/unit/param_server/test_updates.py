"""One record: once, in order, newest wins, and what cannot be applied becomes a letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_server.contract import BadRecord, Op, Reason, UpdateBatch, decode_batch
from param_server.feed import Feed
from param_server.updates import Outcome, Progress, StreamRecord, apply_records, row_versions
from tests.unit.param_server.support import (
    GENERATION,
    ITEM,
    N_PARTITIONS,
    a_batch,
    a_record,
    a_table,
    keys_in,
    value_of,
)

KEY, OTHER = keys_in(0, 2)


def applied(record: StreamRecord, table: object, progress: Progress) -> Outcome:
    return apply_records([record], {GENERATION: {ITEM: table}}, {record.partition: progress}, N_PARTITIONS)  # type: ignore[dict-item]


def test_rows_and_position_move_together() -> None:
    table, progress = a_table(), Progress()
    outcome = applied(a_record(a_batch([KEY, OTHER], 3.0), offset=5), table, progress)
    assert (outcome.applied, progress.offset, progress.event_time_us) == (2, 6, 1000)
    assert value_of(table, KEY) == 3.0


def test_a_record_below_the_position_is_never_applied_again() -> None:
    table, progress = a_table(), Progress()
    record = a_record(a_batch([KEY], 2.0, op=Op.ADD), offset=5)
    assert applied(record, table, progress).applied == 1
    assert applied(record, table, progress).repeated
    assert value_of(table, KEY) == 2.0


def test_the_order_of_the_log_decides_and_beats_what_a_release_carries() -> None:
    table, progress = a_table(), Progress()
    applied(a_record(a_batch([KEY], 1.0, versions=[1]), offset=0), table, progress)
    applied(a_record(a_batch([KEY], 2.0), offset=1), table, progress)
    applied(a_record(a_batch([KEY], 3.0), offset=2), table, progress)
    assert value_of(table, KEY) == 3.0


def test_after_the_log_was_lost_its_new_offsets_still_count_as_newer() -> None:
    table, progress = a_table(), Progress()
    applied(a_record(a_batch([KEY], 1.0), offset=1_000_000), table, progress)
    progress.offset, progress.log_epoch = 0, 1
    assert applied(a_record(a_batch([KEY], 2.0), offset=0), table, progress).applied == 1
    assert value_of(table, KEY) == 2.0


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 100), st.integers(0, 100))
def test_log_versions_order_first_by_epoch_then_by_offset(a: int, b: int, epoch_a: int, epoch_b: int) -> None:
    one, two = row_versions(a_batch([1]), a, epoch_a)[0], row_versions(a_batch([1]), b, epoch_b)[0]
    assert (one < two) == ((epoch_a, a) < (epoch_b, b))


def test_a_base_version_orders_the_whole_record() -> None:
    table, progress = a_table(), Progress()
    applied(a_record(a_batch([KEY], 1.0, base_version=10), offset=0), table, progress)
    assert applied(a_record(a_batch([KEY], 2.0, base_version=9), offset=1), table, progress).stale == 1
    assert value_of(table, KEY) == 1.0


def test_an_add_with_a_base_version_always_counts() -> None:
    table, progress = a_table(), Progress()
    for offset in (0, 1):
        applied(a_record(a_batch([KEY, KEY], 1.0, op=Op.ADD, base_version=9), offset=offset), table, progress)
    assert value_of(table, KEY) == 4.0


def test_an_add_with_row_versions_can_be_stale() -> None:
    table, progress = a_table(), Progress()
    for offset in (0, 1):
        applied(a_record(a_batch([KEY], 1.0, op=Op.ADD, versions=[9]), offset=offset), table, progress)
    assert value_of(table, KEY) == 1.0


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (a_batch([KEY], generation=8), "generation"),
        (a_batch([KEY], table_id=99), "table"),
        (a_batch([KEY], dim=3), "dim"),
        (a_batch([KEY, keys_in(1)[0]]), "misrouted"),
    ],
)
def test_a_record_that_does_not_fit_becomes_a_letter_and_the_position_moves_on(
    batch: UpdateBatch, reason: Reason
) -> None:
    table, progress = a_table(), Progress()
    record = a_record(batch, offset=3)
    outcome = applied(record, table, progress)
    (letter,) = outcome.letters
    assert (letter.reason, letter.partition, letter.offset, letter.value) == (reason, 0, 3, record.value)
    assert (table.size, progress.offset, outcome.refused) == (0, 4, batch.keys.size)


def test_a_record_of_a_generation_that_other_shards_serve_is_passed_over() -> None:
    table, progress = a_table(), Progress()
    record = a_record(a_batch([KEY], generation=8), offset=3)

    outcome = apply_records([record], {GENERATION: {ITEM: table}, 8: None}, {0: progress}, N_PARTITIONS)

    assert (outcome.letters, outcome.applied, outcome.refused) == ((), 0, 0)
    assert (table.size, progress.offset) == (0, 4)


def test_a_bad_record_becomes_a_letter_with_its_bytes() -> None:
    progress = Progress()
    outcome = applied(StreamRecord(0, 0, b"nonsense", BadRecord("truncated", "8 bytes")), a_table(), progress)
    assert [(x.reason, x.value) for x in outcome.letters] == [("truncated", b"nonsense")]
    assert progress.offset == 1


def test_only_the_rows_that_find_no_room_become_a_letter() -> None:
    table = a_table(capacity_rows=2)
    keys = keys_in(0, 4)
    applied(a_record(a_batch(keys[:2]), offset=0), table, progress := Progress())
    outcome = applied(a_record(a_batch(keys, 2.0), offset=1), table, progress)
    (letter,) = outcome.letters
    assert (letter.reason, outcome.applied, outcome.refused) == ("table_full", 2, 2)
    again = decode_batch(letter.value)
    assert again.keys.tolist() == keys[2:]
    assert again.rows.tolist() == [[2.0, 2.0]] * 2


def test_a_sum_that_overflows_becomes_a_letter() -> None:
    table, progress = a_table(), Progress()
    applied(a_record(a_batch([KEY], 3e38), offset=0), table, progress)
    outcome = applied(a_record(a_batch([KEY], 3e38, op=Op.ADD), offset=1), table, progress)
    assert [letter.reason for letter in outcome.letters] == ["overflow"]


ops = st.sampled_from(Op)
records = st.lists(
    st.tuples(ops, st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans()), max_size=14
)


@given(records)
def test_neighbours_applied_together_leave_what_they_leave_one_by_one(
    stream: list[tuple[Op, int, list[int], bool]],
) -> None:
    offsets = [0, 0]
    feed = Feed(1 << 20)
    alone, together = a_table(capacity_rows=5), a_table(capacity_rows=5)
    progress_alone = {0: Progress(), 1: Progress()}
    progress_together = {0: Progress(), 1: Progress()}
    generations_alone, generations_together = {GENERATION: {ITEM: alone}}, {GENERATION: {ITEM: together}}
    refused = [0, 0]
    letters: list[list[tuple[str, int, bytes]]] = [[], []]
    for value, (op, partition, picks, again) in enumerate(stream):
        keys = [keys_in(partition, 4)[pick] for pick in picks]
        record = a_record(a_batch(keys, float(value + 1), op=op), offset=offsets[partition], partition=partition)
        offsets[partition] += 1
        for _ in range(1 + again):
            feed.put(record)
            done = apply_records([record], generations_alone, progress_alone, N_PARTITIONS)
            refused[0] += done.refused
            letters[0] += [(letter.reason, letter.offset, letter.value) for letter in done.letters]
    while (run := feed.take_run(9)) is not None:
        assert isinstance(run, list)
        done = apply_records(run, generations_together, progress_together, N_PARTITIONS)
        refused[1] += done.refused
        letters[1] += [(letter.reason, letter.offset, letter.value) for letter in done.letters]
    assert progress_alone == progress_together
    if not refused[0]:
        for key in keys_in(0, 4) + keys_in(1, 4):
            assert value_of(alone, key) == value_of(together, key)
        assert sorted(alone.export().versions.tolist()) == sorted(together.export().versions.tolist())
    assert bool(refused[0]) == bool(refused[1])


def test_a_bad_record_in_a_run_becomes_its_own_letter_and_the_others_count() -> None:
    table, progress = a_table(), Progress()
    run = [a_record(a_batch([KEY], 1.0), offset=0), a_record(a_batch(keys_in(1), 2.0), offset=1),
           a_record(a_batch([OTHER], 3.0), offset=2)]  # fmt: skip
    outcome = apply_records(run, {GENERATION: {ITEM: table}}, {0: progress}, N_PARTITIONS)
    assert (outcome.applied, outcome.refused, progress.offset) == (2, 1, 3)
    assert [(letter.reason, letter.offset) for letter in outcome.letters] == [("misrouted", 1)]


def test_rows_without_room_go_back_to_the_records_they_came_in() -> None:
    keys = keys_in(0, 6)
    table, progress = a_table(capacity_rows=3), Progress()
    run = [a_record(a_batch(keys[:2], 1.0, op=Op.ADD), offset=0), a_record(a_batch(keys[2:], 2.0, op=Op.ADD), offset=1)]
    outcome = apply_records(run, {GENERATION: {ITEM: table}}, {0: progress}, N_PARTITIONS)
    (letter,) = outcome.letters
    assert (outcome.applied, letter.offset, letter.detail) == (3, 1, "3 of 4 rows")
    assert decode_batch(letter.value).keys.tolist() == keys[3:]


@pytest.mark.parametrize("other", [{"versions": [1]}, {"base_version": 5}, {"generation": 8}, {"op": Op.ADD}])
def test_only_records_of_one_kind_that_the_log_orders_are_applied_together(other: dict[str, object]) -> None:
    plain = a_record(a_batch([KEY]), offset=0)
    assert a_record(a_batch([OTHER]), offset=1).joins(plain)
    assert not a_record(a_batch([OTHER], **other), offset=1).joins(plain)  # type: ignore[arg-type]
    assert not StreamRecord(0, 1, b"", BadRecord("crc", "")).joins(plain)
