"""Equal tables are one file; nothing that is half, damaged or somebody else's is used; and what goes wrong is told."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from infra.errors import ReleaseRefused
from infra.release import Release, read_release
from infra.settings import Settings
from param_server import images as module
from param_server.contract import Op, TableSpec
from param_server.generation import Place
from param_server.images import Begun, Images, claimed, drop_images, image_folder, image_name, image_names
from param_server.residence import Residence
from param_server.retire import drop_unserved_images
from param_server.specs import table_specs
from param_server.table import RowBatch
from param_server.table.cpu import CpuTable
from tests.small_disk import fill_up, small_disk
from tests.unit.param_server.support import StillClock
from tests.unit.param_server.test_generation import KEYS, a_release

PLACE = Place(0, 1, 8)
ROOM = {"headroom": 2.0, "min_capacity_rows": 1}
ALL = {"n_shards": 1, "n_partitions": 8, **ROOM}


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return a_release(tmp_path)


def begin(folder: Path, release: Release, wait_s: float = 20.0) -> tuple[Images, Begun]:
    images = Images(folder, wait_s)
    return images, images.begin(release, PLACE, **ROOM)


def is_whole(begun: Begun) -> bool:
    rows, found = begun.tables["item"].lookup(KEYS)
    return bool(found.all()) and set(rows.ravel().tolist()) == {1.0}


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_equal_tables_of_two_releases_are_one_file(tmp_path: Path, release: Release) -> None:
    (tmp_path / "b").mkdir()
    other = a_release(tmp_path / "b")
    folder = tmp_path / "images"
    for each in (release, other, release):
        images, begun = begin(folder, each)
        assert is_whole(begun)
        assert (set(images.mapped), images.private) == ({"item"}, {})
    assert files(folder) == [".image"]
    (tmp_path / "c").mkdir()
    begin(folder, a_release(tmp_path / "c", row=2.0))
    assert files(folder) == [".image", ".image"]


def test_the_name_depends_on_all_that_the_bytes_depend_on(release: Release) -> None:
    entry = release.manifest.tables[0]
    spec = table_specs(release)["item"]
    places = [Place(0, 1, 8), Place(0, 2, 8), Place(1, 2, 8), Place(0, 1, 4)]
    specs = [spec, replace(spec, capacity_rows=999), replace(spec, default_row=spec.default_row + 1)]

    def name(fingerprint: str, spec: TableSpec, place: Place) -> str:
        return image_name(type(entry)(**{**_fields(entry), "fingerprint": fingerprint}), spec, place)

    names = [name(f, s, p) for f in ("a", "b") for s in specs for p in places]
    assert len(set(names)) == len(names)
    # Of which release it is, and how it is called there, does not count.
    renamed = type(entry)(**{**_fields(entry), "name": "other", "table_id": 9})
    assert image_name(renamed, spec, PLACE) == image_name(entry, spec, PLACE)


def _fields(entry: object) -> dict[str, object]:
    return {name: getattr(entry, name) for name in ("name", "table_id", "dim", "dtype", "rows", "fingerprint")}


def test_two_that_want_the_same_image_at_once_build_it_once(
    tmp_path: Path, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[int] = []
    both = threading.Barrier(2)
    build, load = module.build, module.load

    def counted(*args: object) -> None:
        builds.append(1)
        build(*args)  # type: ignore[arg-type]

    def after_both_have_looked(*args: object) -> object:
        if threading.current_thread() in waiting:
            waiting.discard(threading.current_thread())
            both.wait(30)
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build", counted)
    monkeypatch.setattr(module, "load", after_both_have_looked)
    found: list[tuple[Images, Begun]] = []
    threads = [threading.Thread(target=lambda: found.append(begin(tmp_path / "images", release))) for _ in range(2)]
    waiting = set(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [1]
    assert [(is_whole(begun), images.private) for images, begun in found] == [(True, {})] * 2
    assert files(tmp_path / "images") == [".image"]


def test_a_builder_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path, release: Release) -> None:
    folder = tmp_path / "images"
    folder.mkdir(mode=0o700)
    draft = folder / f".{next(iter(image_names(release, **ALL)))}.draft"
    held = claimed(draft)
    assert held is not None
    images, begun = begin(folder, release, wait_s=0.1)
    assert is_whole(begun)
    assert (images.mapped, list(images.private)) == ({}, ["item"])
    assert "another process" in images.private["item"]
    os.close(held)
    images, _ = begin(folder, release)
    assert images.private == {}


def _build_and_stand_still(folder: Path, path: Path, told: Connection) -> None:
    def slow(table: CpuTable, state: object) -> bool:
        assert whole(table, state)  # type: ignore[arg-type]
        told.send(len(list(folder.glob(".*.draft"))))
        signal.pause()
        return True

    whole = module.put
    module.put = slow  # type: ignore[assignment]
    begin(folder, read_release(path))


def test_a_process_killed_while_it_builds_leaves_nothing_that_is_used(tmp_path: Path, release: Release) -> None:
    folder = tmp_path / "images"
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_build_and_stand_still, args=(folder, release.path, theirs), daemon=True)
    process.start()
    assert ours.poll(120)
    assert ours.recv() == 1
    # While it lives its draft is its own.
    assert drop_images(folder, []) == []
    assert files(folder) == [".draft"]
    process.kill()
    process.join(30)
    assert files(folder) == [".draft"]
    images, begun = begin(folder, release)
    assert is_whole(begun)
    assert (files(folder), images.private) == ([".image"], {})


def test_what_a_killed_process_left_is_removed_with_what_nobody_uses(tmp_path: Path) -> None:
    for name in (".a.draft", "b.image", "c.image"):
        (tmp_path / name).write_bytes(b"half")
    assert drop_images(tmp_path, ["c"]) == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.image"]


def test_a_damaged_image_is_built_again_as_another_file(
    tmp_path: Path, release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "images"
    _, begun = begin(folder, release)
    (image,) = folder.iterdir()
    before = image.stat().st_ino
    content = bytearray(image.read_bytes())
    content[content.index(np.float32(1.0).tobytes() * 2)] ^= 1
    (folder / "other").write_bytes(content)
    (folder / "other").rename(image)
    images, again = begin(folder, release)
    assert is_whole(begun)
    assert is_whole(again)
    assert images.private == {}
    assert "an image is built again" in caplog.text
    assert image.stat().st_ino != before


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_a_file_the_table_is_private_and_says_so(
    tmp_path: Path, release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "images"
    with files_of_at_most(50_000):
        images, begun = begin(folder, release)
    assert is_whole(begun)
    assert (images.mapped, list(images.private)) == ({}, ["item"])
    assert "there is no image of it" in caplog.text
    assert files(folder) == []
    health = Residence(images, StillClock()).health(begun.tables)
    assert health["not_shared"] == images.private
    assert health["memory"] == {"images": 0, "shared_bytes": 0, "private_bytes": begun.tables["item"].bytes}


def test_a_full_disk_makes_the_table_private_and_leaves_no_draft(tmp_path: Path, release: Release) -> None:
    (folder := tmp_path / "images").mkdir(mode=0o700)
    with small_disk(folder, "300k"):
        folder.chmod(0o700)
        images, begun = begin(folder, release)
        assert is_whole(begun)
        assert "No space left" in images.private["item"]
        assert files(folder) == []


def _fill_the_table_on_a_full_disk(folder: Path, path: Path) -> None:
    images = Images(folder)
    begun = images.begin(read_release(path), PLACE, headroom=100.0, min_capacity_rows=1)
    fill_up(folder / "filler")
    keys = np.arange(10_000, dtype=np.int64)
    batch = RowBatch(Op.ASSIGN, keys, np.full(keys.size, 5, np.uint64), np.full((keys.size, 2), 3.0, np.float32))
    assert begun.tables["item"].apply(batch).applied == keys.size
    assert (begun.tables["item"].lookup(keys)[0] == 3.0).all()
    assert images.private == {}


def test_new_rows_need_no_room_on_the_disk_that_an_image_is_on(tmp_path: Path, release: Release) -> None:
    """A page that the disk had no room for would end the process."""
    (folder := tmp_path / "images").mkdir()
    with small_disk(folder, "1m"):
        folder.chmod(0o700)
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_fill_the_table_on_a_full_disk, args=(folder, release.path), daemon=True)
        process.start()
        process.join(120)
        assert process.exitcode == 0


@pytest.mark.parametrize("wrong", ["others may write", "a file is in its place", "in a file"])
def test_a_folder_that_is_not_ours_alone_is_not_used(tmp_path: Path, release: Release, wrong: str) -> None:
    folder = tmp_path / "images"
    if wrong == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_bytes(b"")
    images, begun = begin(folder / "deeper" if wrong == "in a file" else folder, release)
    assert is_whole(begun)
    assert list(images.private) == ["item"]


def test_rows_that_are_not_those_of_the_manifest_come_into_no_image(tmp_path: Path, release: Release) -> None:
    table = release.path / "tables/item.safetensors"
    content = bytearray(table.read_bytes())
    content[-1] ^= 1
    table.write_bytes(content)
    with pytest.raises(ReleaseRefused, match="sha256"):
        begin(tmp_path / "images", release)
    assert files(tmp_path / "images") == []


def test_a_table_without_room_is_refused_and_leaves_nothing(tmp_path: Path, release: Release) -> None:
    with pytest.raises(ReleaseRefused, match="table_headroom"):
        Images(tmp_path / "images").begin(release, PLACE, headroom=0.1, min_capacity_rows=1)
    assert files(tmp_path / "images") == []


def test_images_of_releases_that_are_not_served_any_more_are_removed(tmp_path: Path, release: Release) -> None:
    settings = Settings(home=tmp_path, table_headroom=2.0, table_min_capacity_rows=1)
    (tmp_path / "b").mkdir()
    candidate = a_release(tmp_path / "b", row=2.0)
    for each in (release, candidate):
        begin(image_folder(settings), each)
    assert drop_unserved_images(settings, [release, candidate]) == []
    assert drop_unserved_images(settings, [release]) == sorted(image_names(candidate, **ALL))
    assert [path.stem for path in image_folder(settings).iterdir()] == list(image_names(release, **ALL))
    assert drop_unserved_images(settings.model_copy(update={"table_images": False}), [release])
    assert files(image_folder(settings)) == []
