"""The form of a feedback event in the log."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_service.events import MAX_TS_US, BadEvent, FeedbackEvent, decode_event, encode_event

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)


@given(st.builds(FeedbackEvent, ids, ids, ids, st.integers(0, MAX_TS_US), st.none() | st.text("ab", max_size=20)))
def test_an_event_comes_back_as_it_was(event: FeedbackEvent) -> None:
    assert decode_event(encode_event(event)) == event


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_refused_with_a_reason(value: bytes) -> None:
    try:
        outcome: FeedbackEvent | BadEvent = decode_event(value)
    except BadEvent as error:
        outcome = error
    if isinstance(outcome, BadEvent):
        assert outcome.reason in ("not_json", "invalid")
        assert outcome.detail
    else:
        assert 0 <= outcome.ts_us <= MAX_TS_US


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"user_id": 7}, "user_id"),
        ({"item_id": ""}, "item_id"),
        ({"event": None}, "event"),
        ({"ts_us": -1}, "ts_us"),
        ({"ts_us": 2**53}, "ts_us"),
        ({"ts_us": 1.5}, "ts_us"),
        ({"user_id": "u" * 257}, "user_id"),
    ],
)
def test_a_field_that_is_wrong_is_named(change: dict[str, object], named: str) -> None:
    fields = {"user_id": "u", "item_id": "i", "event": "click", "ts_us": 1, **change}
    with pytest.raises(BadEvent, match=named) as refused:
        decode_event(json.dumps(fields).encode())
    assert refused.value.reason == "invalid"


def test_fields_of_a_newer_producer_are_ignored() -> None:
    value = b'{"user_id": "u", "item_id": "i", "event": "click", "ts_us": 1, "weight": 2}'
    assert decode_event(value) == FeedbackEvent("u", "i", "click", 1)


def test_the_bytes_of_an_event_are_what_other_programs_may_write() -> None:
    event = FeedbackEvent("196", "50", "click", 1_796_131_463_053_000, "r-1")
    assert json.loads(encode_event(event)) == {
        "user_id": "196",
        "item_id": "50",
        "event": "click",
        "ts_us": 1_796_131_463_053_000,
        "recommendation_id": "r-1",
    }
