"""What is memory of one process and what is shared, as the kernel has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.release import Release
from param_server.images import Images
from param_server.residence import Residence, shared_and_private
from param_server.table.image import Span
from tests.support import eventually
from tests.unit.param_server.support import StillClock
from tests.unit.param_server.test_generation import a_release
from tests.unit.param_server.test_images import PLACE, begin


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return a_release(tmp_path)


def test_what_was_written_to_is_private_and_the_rest_is_shared(tmp_path: Path, release: Release) -> None:
    images, begun = begin(tmp_path / "images", release)
    residence = Residence(images, StillClock())
    residence.health(begun.tables)
    eventually(lambda: residence.health(begun.tables)["memory"]["shared_bytes"] is not None)
    memory = residence.health(begun.tables)["memory"]
    assert memory["images"] == 1
    assert memory["private_bytes"] == 0
    assert memory["shared_bytes"] >= 100 * 2 * 4
    span = images.mapped["item"]
    found = shared_and_private(span)
    assert found is not None
    begun.tables["item"].held.arrays.rows[50] = 5.0
    page = os.sysconf("SC_PAGE_SIZE")
    assert shared_and_private(span) == (found[0] - page, page)
    assert sum(length for _, length in span.of_the_file) == found[0]


def test_memory_behind_the_last_entry_is_private_once_it_is_used(tmp_path: Path, release: Release) -> None:
    images = Images(tmp_path / "images")
    table = images.begin(release, PLACE, headroom=1000.0, min_capacity_rows=1).tables["item"]
    before = shared_and_private(images.mapped["item"])
    assert before is not None
    table.held.arrays.rows[-50_000:] = 5.0
    after = shared_and_private(images.mapped["item"])
    assert after is not None
    assert after[0] == before[0]
    assert after[1] - before[1] == pytest.approx(50_000 * 2 * 4, abs=2 * os.sysconf("SC_PAGE_SIZE"))


def test_where_the_kernel_does_not_say_the_sizes_are_unknown(tmp_path: Path) -> None:
    assert shared_and_private(Span(((0, 4096),), ()), tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"1234")
    assert shared_and_private(Span(((0, 4096),), ()), tmp_path / "short") is None
