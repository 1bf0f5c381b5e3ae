"""What a reply says was known."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_service.coverage import MAX_MISSING_IDS, coverage_of, user_kind


def test_candidates_without_a_row_are_named() -> None:
    coverage = coverage_of(np.array([True, False, True, False]), "abcd".__getitem__, scored=4, user="bucket")
    assert (coverage.candidates, coverage.features_found, coverage.missing) == (4, 2, 2)
    assert coverage.missing_ids == ["b", "d"]
    assert coverage.user == "bucket"


@given(st.lists(st.booleans(), max_size=300))
def test_found_and_missing_are_all_candidates_and_the_list_of_ids_is_bounded(found: list[bool]) -> None:
    coverage = coverage_of(np.array(found, np.bool_), str, scored=0, user="known")
    assert coverage.features_found + coverage.missing == coverage.candidates == len(found)
    assert len(coverage.missing_ids) == min(coverage.missing, MAX_MISSING_IDS)


def test_a_user_is_known_by_his_own_row_only() -> None:
    assert user_kind(5, True) == "known"
    assert user_kind(5, False) == "bucket"
    assert user_kind(None, False) == "anonymous"
