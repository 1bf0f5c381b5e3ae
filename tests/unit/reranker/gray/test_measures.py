from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.measures import Figures, above, bucket_of_ms, measure_of, quantile_bucket, upper_ms


@given(st.floats(0.0, 200_000.0))
def test_a_latency_lies_within_five_percent_under_the_end_of_its_bucket(ms: float) -> None:
    bucket = bucket_of_ms(ms)

    assert ms <= upper_ms(bucket) * (1 + 1e-9)
    assert bucket == 0 or ms >= upper_ms(bucket - 1) * (1 - 1e-9)


def test_what_came_between_two_readings_is_their_difference() -> None:
    earlier = Figures(requests=3, events={"click": 1}, latency={5: 3})
    between = Figures(requests=2, degraded=1, events={"buy": 1}, latency={5: 1, 9: 1})

    later = earlier.plus(between)

    assert (later.requests, later.events, later.latency) == (5, {"click": 1, "buy": 1}, {5: 4, 9: 1})
    since = later.minus(earlier)
    assert (since.requests, since.degraded, since.events["buy"], since.latency[9]) == (2, 1, 1, 1)


def test_a_quantile_is_the_bucket_that_holds_it() -> None:
    latency = {10: 98, 20: 1, 30: 1}

    assert quantile_bucket(latency, 0.5) == 10
    assert quantile_bucket(latency, 0.99) == 20
    assert quantile_bucket(latency, 1.0) == 30
    assert [above(latency, at) for at in (9, 10, 25, 30)] == [100, 2, 1, 0]


def test_clicks_are_counted_per_item_shown() -> None:
    measure = measure_of("click_through")

    assert measure is not None
    assert measure.counts(Figures(requests=1, impressions=20, events={"click": 3})) == (3, 20)


@pytest.mark.parametrize("metric", ["rate:buy", "error_share", "latency_p99"])
def test_known_metrics_are_found(metric: str) -> None:
    found = measure_of(metric)

    assert found is not None
    assert found.name == metric


def test_an_unknown_metric_is_not_found() -> None:
    assert measure_of("happiness") is None
