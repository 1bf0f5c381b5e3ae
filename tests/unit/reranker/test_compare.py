"""Which releases a training can be compared with, and how the comparison is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_ranker.bootstrap import Difference
from infra.errors import ReleaseRefused
from infra.release import Release
from reranker.compare import check_comparable, in_report, lines_of
from tests.tiny_release import write_tiny_release

OURS = "2024-05-01T00:00:00+00:00"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_tiny_release(tmp_path / "old")


def _with_report(release: Release, report: dict[str, Any]) -> Release:
    return replace(release, manifest=msgspec.structs.replace(release.manifest, report=report))


@pytest.mark.parametrize("theirs", [OURS, "2024-04-30T23:59:59+00:00"])
def test_a_release_of_the_same_or_an_earlier_log_can_be_compared(release: Release, theirs: str) -> None:
    check_comparable(_with_report(release, {"split": {"test_from": theirs}}), OURS)


def test_a_release_that_knows_part_of_the_test_period_is_refused(release: Release) -> None:
    later = _with_report(release, {"split": {"test_from": "2024-05-02T00:00:00+00:00"}})
    with pytest.raises(ReleaseRefused, match=r"was trained on events until 2024-05-02.*part of this test period"):
        check_comparable(later, OURS)


def test_a_release_that_does_not_say_what_it_knows_is_refused(release: Release) -> None:
    with pytest.raises(ReleaseRefused, match="does not say where its training period ends"):
        check_comparable(release, OURS)


def test_only_a_difference_whose_interval_leaves_out_zero_is_called_one(release: Release) -> None:
    differences = {
        "edge": {
            "uniform": {
                "auc": Difference(0.92, 0.90, 0.01, 0.03),
                "gauc": Difference(0.90, 0.92, -0.03, -0.01),
                "ndcg_at_10": Difference(0.31, 0.30, -0.02, 0.04),
            }
        },
        "rerank": {},
    }
    report = in_report(differences, release)
    first, *lines = lines_of(report)
    assert first == "beside release tiny, difference and 95% interval over users:"
    assert "0.9000 -> 0.9200  +0.0200 [+0.0100, +0.0300]  better" in lines[0]
    assert lines[1].endswith("[-0.0300, -0.0100]  worse")
    assert lines[2].endswith("+0.0100 [-0.0200, +0.0400]")
    assert report["generation"] == release.manifest.generation
