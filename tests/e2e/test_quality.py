"""The release that `make serve` trains is as good as the README says."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.release import read_release


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "negatives", "least"),
    [
        ("edge", "uniform", 0.90),
        ("edge", "popularity", 0.82),
        ("rerank", "uniform", 0.92),
        ("rerank", "popularity", 0.86),
    ],
)
def test_the_test_period_auc_is_reached_and_beats_popularity(
    release_dir: Path, model: str, negatives: str, least: float
) -> None:
    report = read_release(release_dir).manifest.report
    auc = report["models"][model][negatives]["auc"]
    baseline = report["models"]["popularity"][negatives]["auc"]
    assert auc >= least
    assert auc > baseline + 0.05
