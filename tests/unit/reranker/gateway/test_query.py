from __future__ import annotations

import numpy as np
import pytest

from feature_service.hashing import ITEM, key_of
from reranker.gateway.problems import Problem
from reranker.gateway.query import Query, query_of
from reranker.gateway.schemas import RankRequest, RecommendRequest


def query(asked: RecommendRequest | RankRequest, trace_id: str | None = None) -> Query:
    return query_of(asked, nonce=bytes(8), trace_id=trace_id, start_s=5.0, default_deadline_ms=100.0)


def test_a_candidate_named_twice_is_ranked_once_at_its_first_position() -> None:
    found = query(RankRequest(candidates=["b", 7, "a", "7", "b"]))

    assert found.candidates == ["b", "7", "a"]
    assert found.candidate_keys.tolist() == [key_of(ITEM, i) for i in ("b", "7", "a")]
    assert found.duplicates == 2


def test_excluded_candidates_are_not_ranked() -> None:
    found = query(RankRequest(candidates=["a", "b", 3], exclude=["3", "a"]))

    assert found.candidates == ["b"]
    assert found.excluded == {key_of(ITEM, "3"), key_of(ITEM, "a")}


def test_the_history_can_be_taken_out_later() -> None:
    seen = np.array([key_of(ITEM, "a")], np.int64)

    given = query(RecommendRequest(candidates=["a", "b"])).without(seen)
    recalled = query(RecommendRequest(exclude=["x"])).without(seen)

    assert given.candidates == ["b"]
    assert given.candidate_keys.tolist() == [key_of(ITEM, "b")]
    assert recalled.candidates is None
    assert recalled.excluded == {key_of(ITEM, "a"), key_of(ITEM, "x")}


def test_only_rank_repeats_what_the_user_has_seen() -> None:
    assert query(RankRequest(candidates=[])).repeats_history
    assert not query(RecommendRequest(candidates=[])).repeats_history


def test_no_candidates_is_not_the_same_as_candidates_left_out() -> None:
    assert query(RecommendRequest(candidates=[])).candidates == []
    assert query(RecommendRequest()).candidates is None


@pytest.mark.parametrize(
    ("asked", "unit"),
    [
        (RecommendRequest(user_id=196, session_id="s", request_id="q"), "196"),
        (RecommendRequest(session_id="s", request_id="q"), "s"),
        (RecommendRequest(request_id="q"), "q"),
        (RecommendRequest(), bytes(8).hex()),
    ],
)
def test_the_split_goes_by_user_then_session_then_request(asked: RecommendRequest, unit: str) -> None:
    assert query(asked).unit == unit


def test_the_deadline_is_the_requests_or_the_default() -> None:
    assert query(RecommendRequest(deadline_ms=20)).budget.total_s == 0.02
    assert query(RecommendRequest()).budget.total_s == 0.1


def test_a_trace_is_kept_and_the_request_id_stands_in_for_it() -> None:
    assert query(RecommendRequest(request_id="q")).trace_id == "q"
    assert query(RecommendRequest(request_id="q"), "t").trace_id == "t"


def test_an_id_that_is_too_long_in_bytes_is_named() -> None:
    with pytest.raises(Problem) as raised:
        query(RankRequest(candidates=["a", "ü" * 129]))
    assert raised.value.field == "candidates[1]"
