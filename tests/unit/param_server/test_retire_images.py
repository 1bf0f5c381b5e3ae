"""Images of releases that are served, or may come back at once, are kept; others are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.release import Release
from infra.settings import Settings
from param_server.generation import Place
from param_server.images import Images, image_folder
from param_server.retire import tidy
from tests.unit.param_server.test_generation import a_release

NO_REDIS = "redis://127.0.0.1:1"


@pytest.fixture
def three(tmp_path: Path) -> list[Release]:
    """Releases whose tables differ."""
    found = []
    for row in (1.0, 2.0, 3.0):
        (own := tmp_path / f"{row}").mkdir()
        found.append(a_release(own, row=row))
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", shards=2, table_min_capacity_rows=1)


def start_shards(settings: Settings, release: Release) -> list[Images]:
    """What the shards of a release do; a shard has one table."""
    found = [Images(image_folder(settings)) for _ in range(settings.shards)]
    for index, images in enumerate(found):
        place = Place(index, settings.shards, settings.partitions)
        images.begin(release, place, headroom=settings.table_headroom, min_capacity_rows=1)
        assert images.private == {}
    return found


def n_images(settings: Settings) -> int:
    return len(list(image_folder(settings).iterdir()))


def test_images_go_with_the_last_release_that_may_be_served_with_them(settings: Settings, three: list[Release]) -> None:
    base, candidate, before = three
    for release in three:
        start_shards(settings, release)
    tidy(settings, NO_REDIS, [release.path for release in three])
    assert n_images(settings) == 6
    tidy(settings, NO_REDIS, [base.path, before.path])
    assert n_images(settings) == 4
    for release in (base, before):
        start_shards(settings, release)
    assert n_images(settings) == 4
    start_shards(settings, candidate)
    assert n_images(settings) == 6


def test_images_of_another_number_of_shards_are_removed(settings: Settings, three: list[Release]) -> None:
    start_shards(settings, three[0])
    tidy(settings.model_copy(update={"shards": 1}), NO_REDIS, [three[0].path])
    assert n_images(settings) == 0


def test_nothing_is_removed_while_a_release_cannot_be_read(
    settings: Settings, three: list[Release], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_shards(settings, three[1])
    tidy(settings, NO_REDIS, [three[0].path, tmp_path / "gone"])
    assert n_images(settings) == 2
    assert "cannot be read" in caplog.text
