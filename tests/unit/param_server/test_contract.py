"""EMBU: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import struct
from typing import get_args

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from param_server.contract import MAX_ROWS, BadRecord, Op, Reason, UpdateBatch, decode_batch, encode_batch


def a_batch(n: int = 3, dim: int = 2, op: Op = Op.ASSIGN, versions: bool = False) -> UpdateBatch:
    rows = np.arange((0 if op is Op.DELETE else n) * dim, dtype=np.float32).reshape(-1, dim)
    return UpdateBatch(
        op, 4, 7, dim, 0, 123, np.arange(n, dtype=np.int64), np.arange(n, dtype=np.uint64) if versions else None, rows
    )


def resealed(value: bytes) -> bytes:
    """The bytes with a checksum that fits."""
    return value[:40] + struct.pack("<I", crc32c.crc32c(value[:40] + value[44:])) + value[44:]


@given(
    op=st.sampled_from(list(Op)),
    keys=hnp.arrays(np.int64, st.integers(1, 20)),
    dim=st.integers(1, 5),
    versioned=st.booleans(),
    data=st.data(),
)
def test_any_batch_survives_the_journey(
    op: Op, keys: np.ndarray, dim: int, versioned: bool, data: st.DataObject
) -> None:
    n = keys.size
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    rows = data.draw(hnp.arrays(np.float32, (0 if op is Op.DELETE else n, dim), elements=finite))
    versions = data.draw(hnp.arrays(np.uint64, n)) if versioned else None
    base, time_us = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(-(2**63), 2**63 - 1))
    got = decode_batch(encode_batch(UpdateBatch(op, 2**32 - 1, 0, dim, base, time_us, keys, versions, rows)))
    assert (got.op, got.table_id, got.generation, got.dim) == (op, 2**32 - 1, 0, dim)
    assert (got.base_version, got.event_time_us) == (base, time_us)
    np.testing.assert_array_equal(got.keys, keys)
    np.testing.assert_array_equal(got.rows, rows)
    assert (got.versions is None) is (versions is None)
    if versions is not None and got.versions is not None:
        np.testing.assert_array_equal(got.versions, versions)


def test_decoded_arrays_are_aligned_and_our_own() -> None:
    got = decode_batch(encode_batch(a_batch(versions=True)))
    for array in (got.keys, got.versions, got.rows):
        assert array is not None
        assert array.flags.aligned
        assert array.flags.writeable


def patched(at: int, new: bytes) -> bytes:
    value = encode_batch(a_batch())
    return resealed(value[:at] + new + value[at + len(new) :])


REFUSED: list[tuple[bytes, Reason]] = [
    (b"", "truncated"),
    (encode_batch(a_batch())[:43], "truncated"),
    (patched(0, b"X"), "magic"),
    (patched(4, b"\x02"), "format"),
    (patched(6, b"\x00"), "op"),
    (patched(6, b"\x04"), "op"),
    (patched(16, b"\x02"), "dtype"),
    (patched(17, b"\x02"), "flags"),
    (patched(17, b"\x01"), "length"),
    (patched(18, b"\x03"), "length"),
    (patched(20, b"\x00\x00\x00\x00"), "empty"),
    (patched(20, b"\xff\xff\xff\xff"), "too_many_rows"),
    (patched(20, b"\x02"), "length"),
    (encode_batch(a_batch()) + b"\x00", "length"),
    (encode_batch(a_batch())[:-1], "length"),
    (encode_batch(a_batch())[:-1] + b"\x7f", "crc"),
    (patched(44 + 24, struct.pack("<f", float("nan"))), "non_finite"),
    (patched(44 + 24, struct.pack("<f", float("-inf"))), "non_finite"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED)
def test_a_wrong_record_is_refused_with_its_reason(value: bytes, reason: Reason) -> None:
    with pytest.raises(BadRecord) as refused:
        decode_batch(value)
    assert refused.value.reason == reason
    assert refused.value.reason in get_args(Reason)


@given(st.integers(0, len(encode_batch(a_batch())) * 8 - 1))
def test_one_flipped_bit_is_always_noticed(bit: int) -> None:
    value = bytearray(encode_batch(a_batch()))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadRecord):
        decode_batch(bytes(value))


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_and_nothing_else_happens(value: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_batch(b"EMBU\x01\x00" + value)


@pytest.mark.parametrize("n", [0, MAX_ROWS + 1])
def test_a_producer_cannot_send_no_rows_or_too_many(n: int) -> None:
    with pytest.raises(BadRecord):
        encode_batch(a_batch(n))


def test_a_producer_cannot_send_a_number_that_is_not_finite() -> None:
    batch = a_batch()
    batch.rows[1, 1] = np.inf
    with pytest.raises(BadRecord, match="non_finite"):
        encode_batch(batch)


def test_take_keeps_the_chosen_rows_and_the_rest_of_the_record() -> None:
    taken = a_batch(versions=True).take(np.array([2, 0]))
    assert taken.keys.tolist() == [2, 0]
    assert taken.rows.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert taken.versions is not None
    assert taken.versions.tolist() == [2, 0]
    assert a_batch(op=Op.DELETE).take(np.array([1])).rows.shape == (0, 2)
