from __future__ import annotations

from dataclasses import replace

import pytest

from reranker.gray.gates import judge
from reranker.gray.measures import Figures, bucket_of_age, bucket_of_unit
from reranker.gray.plan import Gate
from reranker.gray.readings import Readings, Window

OVERLAP = Gate(metric="overlap_at_k", kind="minimum", limit=0.5)
ORDER = Gate(metric="rank_correlation", kind="minimum", limit=0.2)
DRIFT = Gate(metric="score_drift", limit=0.1)
CATALOGUE = Gate(metric="catalogue_share", kind="minimum", limit=0.8)
COVERAGE = Gate(metric="coverage", kind="minimum", limit=0.95)
STALE = Gate(metric="embedding_staleness", limit=60)
ALL = [OVERLAP, ORDER, DRIFT, CATALOGUE, COVERAGE, STALE]

SCORES = dict.fromkeys(range(-10, 10), 2000)
GOOD = Figures(
    requests=2000, candidates=1_000_000, missing_rows=100, items=9_000, scores=SCORES, ages={bucket_of_age(5.0): 2000}
)
ALIKE = Figures(
    requests=500, overlap={bucket_of_unit(0.8): 400, bucket_of_unit(0.4): 100}, agreement={bucket_of_unit(0.9): 500}
)


def readings(candidate: Figures = GOOD, shadow: Figures = ALIKE, baseline: Figures = GOOD) -> Readings:
    window = Window(candidate, candidate, baseline, shadow, replace(baseline, requests=shadow.requests))
    return Readings((window,) * 3, window, window)


def verdict(gate: Gate, **changed: Figures) -> str:
    return judge(gate, readings(**changed)).verdict


@pytest.mark.parametrize("gate", ALL, ids=lambda gate: gate.metric)
def test_a_release_that_does_as_well_as_stable_is_healthy(gate: Gate) -> None:
    found = judge(gate, readings())

    assert found.verdict == "healthy", found.sentence


@pytest.mark.parametrize("gate", ALL, ids=lambda gate: gate.metric)
def test_without_samples_every_gate_is_inconclusive_and_says_so(gate: Gate) -> None:
    found = judge(gate, readings(Figures(), Figures(), Figures()))

    assert found.verdict == "inconclusive"
    assert found.sentence == f"{gate.metric}: 0 samples, at least 100 are needed"


@pytest.mark.parametrize("gate", [OVERLAP, ORDER], ids=lambda gate: gate.metric)
def test_answers_that_have_little_in_common_with_stables_fail(gate: Gate) -> None:
    foreign = Figures(requests=400, overlap={bucket_of_unit(0.1): 400}, agreement={bucket_of_unit(0.3): 400})
    found = judge(gate, readings(shadow=foreign))

    assert found.verdict == "unhealthy"
    assert "on average of 400 comparisons" in found.sentence


def test_comparisons_of_an_earlier_step_count_in_one_without_a_shadow() -> None:
    window = Window(GOOD, GOOD, GOOD, ALIKE, GOOD)
    now = replace(window, shadow=Figures())

    assert judge(OVERLAP, Readings((now,) * 3, now, window)).verdict == "healthy"


def test_answers_that_drift_apart_in_a_late_step_are_found_though_the_release_began_well() -> None:
    late = Figures(requests=300, overlap={bucket_of_unit(0.2): 300})
    begun = Figures(requests=10_000, overlap={bucket_of_unit(0.9): 10_000})
    step, total = Window(shadow=late), Window(shadow=begun.plus(late))

    assert judge(OVERLAP, Readings((step,) * 3, step, total)).verdict == "unhealthy"


def test_ninety_nine_comparisons_are_no_evidence() -> None:
    few = Figures(requests=99, overlap={0: 99}, agreement={0: 99})

    assert verdict(OVERLAP, shadow=few) == verdict(ORDER, shadow=few) == "inconclusive"


def test_scores_that_moved_fail_and_those_that_only_scatter_do_not() -> None:
    moved = replace(GOOD, scores={at + 6: n for at, n in SCORES.items()})
    scattered = replace(GOOD, scores={at: n + (40 if at % 2 else -40) for at, n in SCORES.items()})

    assert verdict(DRIFT, candidate=moved) == "unhealthy"
    assert verdict(DRIFT, candidate=scattered) == "healthy"


def test_scores_of_few_answers_move_by_chance() -> None:
    few = replace(GOOD, requests=120, scores={at: 100 + 30 * (at % 3) for at in range(-10, 10)})

    assert verdict(DRIFT, candidate=few, baseline=replace(GOOD, requests=120)) != "unhealthy"


def test_a_release_that_shows_everybody_the_same_few_items_fails() -> None:
    found = judge(CATALOGUE, readings(replace(GOOD, items=2_000)))

    assert found.verdict == "unhealthy"
    assert "0.22 times the baseline's" in found.sentence


def test_fewer_answers_may_show_fewer_items() -> None:
    assert verdict(CATALOGUE, candidate=replace(GOOD, requests=1000, items=4_600)) == "healthy"


def test_candidates_without_rows_are_lacking_coverage() -> None:
    assert verdict(COVERAGE, candidate=replace(GOOD, missing_rows=100_000)) == "unhealthy"


def test_rows_that_are_old_fail_unless_stables_are_as_old() -> None:
    old = replace(GOOD, ages={bucket_of_age(500.0): 2000})

    assert verdict(STALE, candidate=old) == "unhealthy"
    assert verdict(STALE, candidate=old, baseline=old) == "healthy"


@pytest.mark.parametrize("gate", ALL, ids=lambda gate: gate.metric)
def test_a_dry_run_gate_says_that_it_is_one(gate: Gate) -> None:
    dry = Gate(**{name: getattr(gate, name) for name in Gate.__struct_fields__ if name != "dry_run"}, dry_run=True)

    assert judge(dry, readings()).dry_run
    assert judge(dry, readings(Figures(), Figures(), Figures())).dry_run
