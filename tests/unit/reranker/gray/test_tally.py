from __future__ import annotations

from dataclasses import replace

from reranker.gray.attribution import Attribution
from reranker.gray.compare import Likeness
from reranker.gray.measures import bucket_of_age
from reranker.gray.split import Assignment
from reranker.gray.tally import MAX_EVENT_NAMES, SEEN, Outcome, Sample, Sight, Tally

CANDIDATE = Assignment("b", "candidate", 5, "split", True, 7)
BASELINE = Assignment("a", "stable", 900_000, "split", True, 7)
FINE = Outcome(
    took_ms=3.0, failed=False, late=False, degraded=False, candidates=500, missing_rows=2, cold=True, shown=20
)
SHOWN = Attribution(7, 1, "candidate", True, 0, b"")


def tally() -> Tally:
    found = Tally()
    found.begin(7)
    return found


def test_replies_are_counted_by_sample() -> None:
    counts = tally()
    counts.answered(CANDIDATE, FINE)
    counts.answered(CANDIDATE, replace(FINE, degraded=True, late=True, failed=True, cold=False))
    counts.answered(BASELINE, FINE)

    found = counts.figures()
    mine = found[Sample("candidate", True)]
    assert (mine.requests, mine.degraded, mine.deadline_misses, mine.errors, mine.cold) == (2, 1, 1, 1, 1)
    assert (mine.candidates, mine.missing_rows, mine.impressions, sum(mine.latency.values())) == (1000, 4, 40, 2)
    assert found[Sample("stable", True)].requests == 1


SIGHT = Sight(items=["i1", "i2"], scores=[0.9, 0.1], age_s=5.0)


def test_what_the_compared_samples_show_is_looked_at_and_each_item_told_once() -> None:
    counts = tally()
    counts.showed(CANDIDATE, SIGHT)
    counts.showed(CANDIDATE, SIGHT)
    counts.showed(CANDIDATE._replace(compared=False), Sight(["i3"], [0.5], None))

    mine = counts.figures()[Sample("candidate", True)]
    assert sorted(mine.scores.values()) == [2, 2]
    assert mine.ages == {bucket_of_age(5.0): 2}
    assert [len(places) for places in counts.new_places().values()] == [0, 0, 0, 2]


def test_shadow_traffic_is_counted_beside_what_was_shown_and_in_no_sample_of_its_own_arm() -> None:
    counts = tally()
    counts.shadowed(7, (FINE, SIGHT), (replace(FINE, degraded=True), SIGHT), None)
    counts.shadowed(7, (FINE, SIGHT), (FINE, SIGHT), Likeness(1.0, 0.5))
    counts.shadowed(6, (FINE, SIGHT), (FINE, SIGHT), Likeness(1.0, 0.5))

    found = counts.figures()
    assert set(found) == {Sample("shadow", True), Sample("shadowed", True)}
    shadow, shown = found[Sample("shadow", True)], found[Sample("shadowed", True)]
    assert (shadow.requests, shadow.degraded, shadow.overlap, shadow.agreement) == (2, 1, {100: 1}, {50: 1})
    assert (shown.requests, shown.degraded, shown.overlap) == (2, 0, {})


def test_requests_whose_arm_was_forced_are_in_no_sample() -> None:
    counts = tally()
    counts.answered(Assignment("b", "candidate", 5, "override"), FINE)

    assert counts.figures() == {}


def test_events_count_for_what_showed_the_item() -> None:
    counts = tally()

    assert counts.happened(SHOWN, "click")
    assert counts.happened(replace(SHOWN, arm="stable"), "click")
    assert counts.figures()[Sample("candidate", True)].events == {"click": 1}
    assert counts.figures()[Sample("stable", True)].events == {"click": 1}


def test_nothing_of_another_gray_release_is_counted() -> None:
    counts = tally()
    counts.answered(CANDIDATE._replace(epoch=6), FINE)

    assert not counts.happened(replace(SHOWN, epoch=6), "click")
    assert not counts.happened(replace(SHOWN, epoch=0), "click")
    assert counts.figures() == {}
    counts.answered(CANDIDATE, FINE)
    counts.begin(8)
    assert counts.figures() == {}
    assert counts.new_places() == {key: [] for key in SEEN}


def test_without_a_gray_release_nothing_is_counted() -> None:
    counts = Tally()
    counts.answered(CANDIDATE._replace(epoch=0), FINE)

    assert counts.figures() == {}


def test_the_names_of_events_are_bounded() -> None:
    counts = tally()
    for i in range(MAX_EVENT_NAMES + 10):
        counts.happened(SHOWN, f"e{i}")

    assert len(counts.figures()[Sample("candidate", True)].events) == MAX_EVENT_NAMES


def test_each_unit_is_told_once_and_again_until_it_is_known() -> None:
    counts = tally()
    for assigned in (CANDIDATE, CANDIDATE, BASELINE):
        counts.answered(assigned, FINE)
    told = counts.new_places()
    assert told == {**{key: [] for key in SEEN}, "stable": [900_000], "candidate": [5]}
    assert counts.new_places() == told

    counts.answered(CANDIDATE._replace(bucket_ppm=6), FINE)
    counts.told(7, told)

    assert counts.new_places() == {**{key: [] for key in SEEN}, "candidate": [6]}
