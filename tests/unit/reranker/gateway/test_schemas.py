from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gateway.problems import Problem
from reranker.gateway.schemas import FeedbackRequest, RankRequest, RecommendRequest, parse, text_id, text_ids


def problem(body: bytes | dict[str, Any], kind: type = RecommendRequest) -> Problem:
    with pytest.raises(Problem) as raised:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return raised.value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user": "196"}, "user"),
        ({"user_id": True}, "user_id"),
        ({"user_id": 1.5}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"user_id": "a" * 257}, "user_id"),
        ({"user_id": ["196"]}, "user_id"),
        ({"k": 0}, "k"),
        ({"k": 501}, "k"),
        ({"k": "10"}, "k"),
        ({"k": True}, "k"),
        ({"k": None}, "k"),
        ({"k": 1.5}, "k"),
        ({"candidates": ["1"] * 2001}, "candidates"),
        ({"candidates": ["1", {}]}, "candidates[1]"),
        ({"candidates": ["1", ""]}, "candidates[1]"),
        ({"candidates": "1"}, "candidates"),
        ({"exclude": [None]}, "exclude[0]"),
        ({"context": []}, "context"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"deadline_ms": 60001}, "deadline_ms"),
        ({"deadline_ms": float("nan")}, "deadline_ms"),
        ({"deadline_ms": float("-inf")}, "deadline_ms"),
        ({"explain": 1}, "explain"),
        ({"request_id": 5}, "request_id"),
        ({"context": {"age": [1, float("inf")]}}, "context.age[1]"),
        (b'{"deadline_ms": 1e999}', "deadline_ms"),
        (b"[]", "$"),
        (b"null", "$"),
        (b"NaN", "$"),
    ],
)
def test_a_field_that_is_not_valid_is_named(body: bytes | dict[str, Any], field: str) -> None:
    found = problem(body)

    assert (found.status, found.field) == (422, field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"k": 1} x',
        b'{"k": 1,}',
        b"{'k': 1}",
        b"\xff\xfe",
        b'{"user_id": "\xff"}',
        b'{"user_id": "\\ud800"}',
        b'{"context": {"a": ' + b"[" * 100_000 + b"}}",
        b'{"deadline_ms": NaN',
    ],
)
def test_what_is_not_json_is_told_apart(body: bytes) -> None:
    found = problem(body)

    assert (found.status, found.field) == (400, None)


def test_rank_needs_candidates() -> None:
    found = problem({"user_id": "1"}, RankRequest)

    assert (found.status, found.field) == (422, "candidates")


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"item_id": "1", "event": "click"}, "events[0].user_id"),
        ({"user_id": None, "item_id": "1", "event": "click"}, "events[0].user_id"),
        ({"user_id": "1", "item_id": "1", "event": ""}, "events[0].event"),
        ({"user_id": "1", "item_id": "1", "event": "click", "ts": -1}, "events[0].ts"),
        ({"user_id": "1", "item_id": "1", "event": "click", "ts": "now"}, "events[0].ts"),
        ({"user_id": "1", "item_id": "1", "event": "click", "weight": 1}, "events[0].weight"),
    ],
)
def test_a_feedback_event_that_is_not_valid_is_named(event: dict[str, Any], field: str) -> None:
    assert problem({"events": [event]}, FeedbackRequest).field == field


@pytest.mark.parametrize("n", [0, 1001])
def test_feedback_has_one_to_a_thousand_events(n: int) -> None:
    event = {"user_id": "1", "item_id": "1", "event": "click"}

    assert problem({"events": [event] * n}, FeedbackRequest).field == "events"


def test_defaults_are_those_of_the_interface() -> None:
    asked = parse(b"{}", RecommendRequest)

    assert (asked.user_id, asked.k, asked.candidates, asked.exclude, asked.explain) == (None, 20, None, [], False)


@given(st.one_of(st.integers(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)))
def test_an_id_is_accepted_when_it_has_at_most_256_bytes(raw: int | str) -> None:
    if len(str(raw).encode()) <= 256:
        assert text_id(raw, "user_id") == str(raw)
    else:
        with pytest.raises(Problem) as raised:
            text_id(raw, "user_id")
        assert raised.value.field == "user_id"


def test_a_list_of_ids_names_the_one_that_is_too_long_in_bytes() -> None:
    assert text_ids([1, "1", "ü" * 128], "exclude") == ["1", "1", "ü" * 128]

    for raw in ("ü" * 129, 10**300):
        with pytest.raises(Problem) as raised:
            text_ids([1, raw], "exclude")
        assert raised.value.field == "exclude[1]"
