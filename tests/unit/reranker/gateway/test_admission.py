from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
from prometheus_client import REGISTRY

from reranker.gateway.admission import Admission
from reranker.gateway.problems import Problem, invalid


def test_as_many_are_admitted_as_fit_and_the_next_is_refused() -> None:
    admission, before = Admission(2), counted()

    with ExitStack() as held:
        held.enter_context(admission)
        held.enter_context(admission)
        with pytest.raises(Problem) as raised:
            held.enter_context(admission)
        assert (admission.in_flight, admission.shed) == (2, 1)
        assert counted() == (before[0] + 2, before[1] + 1)

    assert (raised.value.status, raised.value.retry_after_s) == (503, 1)
    assert admission.in_flight == 0
    assert counted() == (before[0], before[1] + 1)


def counted() -> tuple[float, float]:
    """Requests in flight, and refused, as /metrics has them."""
    in_flight, shed = (REGISTRY.get_sample_value(f"gateway_{name}") for name in ("in_flight", "shed_total"))
    assert in_flight is not None
    assert shed is not None
    return in_flight, shed


def test_a_request_that_fails_gives_its_place_back() -> None:
    admission = Admission(1)

    with pytest.raises(ValueError), admission:
        raise ValueError
    with admission:
        assert admission.in_flight == 1


def test_a_problem_is_a_reply_that_names_type_status_and_field() -> None:
    response = invalid("candidates[3]", "Expected a string").response()

    assert response.media_type == "application/problem+json"
    assert msgspec.json.decode(response.body) == {
        "type": "/problems/invalid-request",
        "title": "A field of the request is not valid",
        "status": 422,
        "detail": "Expected a string",
        "field": "candidates[3]",
    }
    assert "retry-after" not in response.headers


def test_a_refusal_says_when_to_come_back() -> None:
    response = Problem("overloaded", "full", retry_after_s=3).response()

    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
