from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.engine.measure import LEAST_TURNS, RUNS_PER_TURN, agreement, auc, resident_bytes, take_turns


def test_engines_take_turns_and_run_equally_often() -> None:
    order: list[str] = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}

    timings = take_turns(runs, 0.0, n_requests=4)

    one_turn = ["a"] * (1 + RUNS_PER_TURN) + ["b"] * (1 + RUNS_PER_TURN)
    assert order[-LEAST_TURNS * len(one_turn) :] == one_turn * LEAST_TURNS
    assert timings["a"].runs == timings["b"].runs == LEAST_TURNS * RUNS_PER_TURN
    for timing in timings.values():
        assert 0 < timing.p50_ms <= timing.p95_ms
        assert timing.requests_per_s == pytest.approx(4e3 / timing.p50_ms)


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=30), st.data())
def test_auc_is_the_share_of_pairs_in_order_ties_counting_half(scores: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(scores) - 1))
    others = [score for i, score in enumerate(scores) if i != place]
    pairs = [1.0 if score < scores[place] else 0.5 if score == scores[place] else 0.0 for score in others]

    assert auc([np.array(scores, np.float32)], [place]) == pytest.approx(sum(pairs) / len(pairs))


def test_requests_that_do_not_say_what_was_taken_do_not_count() -> None:
    best, unknown = np.array([1.0, 9.0], np.float32), np.array([5.0, 1.0], np.float32)

    assert auc([best, unknown], [1, None]) == 1.0
    assert auc([unknown], [None]) is None


def test_an_engine_that_gives_the_recorded_scores_changes_nothing() -> None:
    recorded = [np.random.default_rng(seed).standard_normal(40).astype(np.float32) for seed in range(5)]

    same = agreement(recorded, recorded, [0] * 5)

    assert (same.auc_change_pct, same.overlap_at_20, same.logit_rmse) == (0.0, 1.0, 0.0)


def test_an_engine_that_turns_the_order_round_shows_in_every_number() -> None:
    recorded = [np.arange(40, dtype=np.float32)] * 3

    turned = agreement(recorded, [-scores for scores in recorded], [39] * 3)

    assert (turned.auc, turned.auc_change_pct, turned.overlap_at_20) == (0.0, -100.0, 0.0)
    assert turned.logit_rmse > 1


def test_a_process_knows_what_it_takes_in_memory() -> None:
    # Mapped for this test: malloc may hand out pages that the process has had since an earlier one.
    with mmap.mmap(-1, 100_000_000) as pages:
        before = resident_bytes()
        for _ in range(100):
            pages.write(bytes(1_000_000))

        assert resident_bytes() - before > len(pages) // 2
