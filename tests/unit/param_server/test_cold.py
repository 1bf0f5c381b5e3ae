"""Rows as bytes: what was written is read, and what is damaged is nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from param_server.cold import ABSENT, DELETED, LIVE, N_FLOORS, decode_rows, encode_row, floor_of
from param_server.leaving import Departure
from param_server.routing import partition_of
from param_server.rowstate import RowState

DIM = 3
ROW = np.array([1.5, -2.0, 3.0], np.float32)
U64 = st.integers(0, 2**64 - 1)


def departure(key: int = 5, version: int = 7, order: int = 9, row: np.ndarray | None = ROW) -> Departure:
    return Departure(key, RowState(version, row), order, 1)


@given(key=st.integers(-(2**63), 2**63 - 1), version=U64, order=U64, alive=st.booleans())
def test_what_is_written_is_read(key: int, version: int, order: int, alive: bool) -> None:
    value = encode_row(departure(key, version, order, ROW if alive else None))
    got, damaged = decode_rows(np.array([key]), [value], DIM)
    assert damaged == 0
    assert got.found.tolist() == [LIVE if alive else DELETED]
    assert (got.versions.tolist(), got.orders.tolist()) == ([version], [order])
    assert got.rows.tolist() == [ROW.tolist() if alive else [0.0] * DIM]


def test_the_bytes_are_those_of_the_docstring() -> None:
    value = encode_row(departure(version=0x0102, order=0x0304))
    assert value[:17] == bytes([2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 1])
    assert value[21:] == ROW.tobytes()
    assert value[17:21].hex() == "9b465a39"


@given(at=st.integers(0, 32), bit=st.integers(0, 7), alive=st.booleans())
def test_a_flipped_bit_makes_a_row_nothing(at: int, bit: int, alive: bool) -> None:
    value = bytearray(encode_row(departure(row=ROW if alive else None)))
    value[at % len(value)] ^= 1 << bit
    got, damaged = decode_rows(np.array([5]), [bytes(value)], DIM)
    assert (got.found.tolist(), damaged) == ([ABSENT], 1)


def test_a_row_under_the_key_of_another_is_nothing() -> None:
    got, damaged = decode_rows(np.array([6]), [encode_row(departure(key=5))], DIM)
    assert (got.found.tolist(), damaged) == ([ABSENT], 1)


def test_rows_of_another_dim_and_rubbish_are_nothing() -> None:
    values = [encode_row(departure()), b"", b"short", None]
    got, damaged = decode_rows(np.array([5, 5, 5, 5]), values, DIM + 1)
    assert (got.found.tolist(), damaged) == ([ABSENT] * 4, 3)


def test_keys_of_different_partitions_never_share_a_floor() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 10_000)
    floors = floor_of(keys)
    assert floors.min() >= 0
    assert floors.max() < N_FLOORS
    for n_partitions in (1, 8, 64):
        partitions = partition_of(keys, n_partitions)
        assert len(set(zip(floors.tolist(), partitions.tolist(), strict=True))) == len(set(floors.tolist()))
