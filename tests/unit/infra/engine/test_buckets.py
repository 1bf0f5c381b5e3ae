"""Shapes of GPU engines: every score is computed once, in the smallest bucket that holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.engine.batch import Features
from infra.engine.buckets import ALIGNMENT, Bucket, Grid, Layout, fill
from infra.errors import Permanent

GRID = Grid()
SMALL = Layout(Bucket(2, 5, 4), 6, 3)


@given(batch=st.integers(1, 100), length=st.integers(1, 100), candidates=st.integers(1, 2000))
def test_pieces_cover_every_score_once_and_fit_their_buckets(batch: int, length: int, candidates: int) -> None:
    covered = np.zeros((batch, candidates), np.int64)
    known = set(GRID.buckets())
    for piece in GRID.cut(batch, length, candidates):
        covered[piece.first : piece.last, piece.start : piece.end] += 1
        assert piece.bucket in known
        assert piece.last - piece.first <= piece.bucket.batch
        assert piece.end - piece.start <= piece.bucket.candidates
        assert length <= piece.bucket.length
    assert (covered == 1).all()


@given(batch=st.integers(1, 100), length=st.integers(1, 100), candidates=st.integers(0, 2000))
def test_the_cells_of_a_shape_are_those_of_its_pieces(batch: int, length: int, candidates: int) -> None:
    buckets = [piece.bucket for piece in GRID.cut(batch, length, candidates)]
    assert GRID.cells(batch, length, candidates) == sum(b.batch * b.length * b.candidates for b in buckets)


@given(batch=st.integers(1, 32), length=st.integers(1, 100), candidates=st.integers(1, 512))
def test_what_fits_one_bucket_runs_in_the_smallest_one(batch: int, length: int, candidates: int) -> None:
    (piece,) = GRID.cut(batch, length, candidates)
    holding = [
        b for b in GRID.buckets() if b.batch >= batch and b.length >= length and b.candidates >= candidates
    ]  # fmt: skip
    assert piece.bucket == min(holding)


def test_the_shapes_that_serving_has_waste_less_than_five_percent() -> None:
    for batch, candidates in ((1, 500), (1, 100), (1, 200), (8, 100), (2, 500), (32, 200)):
        assert 1 - batch * 50 * candidates / GRID.cells(batch, 50, candidates) < 0.05


def test_longer_histories_are_refused_and_say_what_to_do() -> None:
    with pytest.raises(Permanent, match=r"101 tokens.*keep the newest"):
        GRID.cut(1, 101, 10)


def test_buckets_come_largest_first_and_the_first_holds_all() -> None:
    buckets = GRID.buckets()
    assert buckets[0] == GRID.largest
    assert buckets == sorted(set(buckets), reverse=True)
    assert len(buckets) == len(GRID.batches) * len(GRID.lengths) * len(GRID.candidates)


@given(
    batch=st.integers(1, 9),
    length=st.integers(1, 30),
    candidates=st.integers(1, 30),
    token=st.integers(1, 70),
    user=st.integers(0, 40),
)
def test_inputs_lie_apart_aligned_and_inside_the_buffer(
    batch: int, length: int, candidates: int, token: int, user: int
) -> None:
    layout = Layout(Bucket(batch, length, candidates), token, user)
    buffer = np.zeros(layout.numbers, np.float32)
    views = layout.views(buffer)
    for mark, view in enumerate((views.hist, views.target, views.mask, views.user), start=1):
        assert view.size == 0 or (view.ctypes.data - buffer.ctypes.data) % (4 * ALIGNMENT) == 0
        view += mark
    for mark, view in enumerate((views.hist, views.target, views.mask, views.user), start=1):
        assert (view == mark).all()


def test_padding_is_zero_whatever_stood_there_and_the_rest_is_the_request() -> None:
    buffer = np.full(SMALL.numbers, np.nan, np.float32)
    views = SMALL.views(buffer)
    part = Features(np.ones((1, 3, 6), np.float32), np.full((1, 2, 6), 2, np.float32), np.ones((1, 3), np.float32),
                    np.full((1, 3), 4, np.float32))  # fmt: skip
    fill(views, part)
    assert (views.hist[0, :3] == 1).all()
    assert (views.hist[0, 3:] == 0).all()
    assert views.mask[0].tolist() == [1, 1, 1, 0, 0]
    assert (views.target[0, :2] == 2).all()
    assert (views.target[0, 2:] == 0).all()
    assert (views.user[0] == 4).all()
