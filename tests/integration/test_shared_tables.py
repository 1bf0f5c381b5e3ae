"""Shards of two releases with an equal table have it in memory once; what one of them updates is its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.embedded import EmbeddedBroker
from infra.release import Release, TableRows, write_release
from param_server.config import ShardConfig
from param_server.contract import Op
from tests.integration.shards import ITEM, Caller, ShardProcess, Topics, asking, publishing, shard_config
from tests.support import eventually

DIM, N_ITEMS = 64, 250_000
TABLE_BYTES = N_ITEMS * DIM * 4
PAGE = 4096


def big_release(path: Path) -> Release:
    """The same item table under whatever name the folder has."""
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    keys = np.arange(N_ITEMS, dtype=np.int64)
    rows = np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)
    table = TableRows(keys, rows, np.ones(N_ITEMS, np.uint64), np.zeros(DIM, np.float32))
    return write_release(
        path, name=path.name, parent=None, created_us=1000, schema={}, schema_fingerprint="abc",
        tables={"item": (ITEM, table)}, models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[], users=[], requests=[], report={}, made_with={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Release]:
    folder = tmp_path_factory.mktemp("releases")
    return big_release(folder / "stable"), big_release(folder / "candidate")


def of_images(pid: int) -> dict[str, int]:
    """What the kernel says, in bytes, of a process's mappings of images."""
    sizes = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = ".image" in line
        elif inside and (name := line.partition(":")[0]) in sizes:
            sizes[name] += 1024 * int(line.split()[1])
    return sizes


@contextmanager
def processes(*started: tuple[ShardConfig, Release]) -> Iterator[list[ShardProcess]]:
    """Shards that start at once, each in a process of its own."""
    with ExitStack() as ends:
        shards = [ShardProcess(config, release, wait=False) for config, release in started]
        for shard in shards:
            ends.callback(shard.kill)
        for shard in shards:
            shard.wait()
        yield shards


def test_stable_and_a_candidate_release_have_an_equal_table_in_memory_once_and_each_its_own_updates(
    broker: EmbeddedBroker, topics: Topics, releases: tuple[Release, Release], tmp_path: Path
) -> None:
    stable, candidate = releases
    assert stable.manifest.generation != candidate.manifest.generation
    first = replace(shard_config(tmp_path, broker.bootstrap, topics), table_headroom=1.5)
    replica = replace(first, replica=1, bind=f"ipc://{tmp_path}/r.sock")
    beside = replace(first, bind=f"ipc://{tmp_path}/c.sock", snapshot_root=tmp_path / "beside")
    with processes((first, stable), (beside, candidate)) as shards:
        assert len(list((tmp_path / "images").glob("*.image"))) == 1
        sizes = [of_images(shard.pid) for shard in shards]
        assert all(size["Rss"] > TABLE_BYTES and size["Anonymous"] == 0 for size in sizes)
        assert sum(size["Pss"] for size in sizes) < 1.2 * TABLE_BYTES

        updated = np.arange(0, N_ITEMS, N_ITEMS // 100, dtype=np.int64)
        with publishing(broker.bootstrap, topics) as publisher:
            rows = np.full((updated.size, DIM), -1.0, np.float32)
            publisher.publish(Op.ASSIGN, ITEM, stable.manifest.generation, updated, rows, 2_000_000)
            publisher.flush()
        last = int(updated[-1])
        with asking(stable, shards[0].address) as caller, asking(candidate, shards[1].address) as other:
            eventually(lambda: updated_all(caller, updated), timeout_s=30)
            assert other.value(last) == float(last)
            eventually(lambda: caller.health()["memory"]["shared_bytes"] is not None)
            assert caller.health()["memory"]["images"] == 1
            assert caller.health()["not_shared"] == {}
            # Row, state, version and stamp of each; index and key stay as they are.
            copied = of_images(shards[0].pid)["Anonymous"]
            assert updated.size * PAGE <= copied <= updated.size * 4 * PAGE
            assert of_images(shards[1].pid)["Anonymous"] == 0
        shards[0].kill()
        with processes((replica, stable)) as (again,), asking(stable, again.address) as caller:
            eventually(lambda: updated_all(caller, updated), timeout_s=30)
            assert caller.value(1) == 1.0
            assert of_images(again.pid)["Anonymous"] <= updated.size * 4 * PAGE
        assert len(list((tmp_path / "images").glob("*.image"))) == 1


def updated_all(caller: Caller, keys: np.ndarray) -> bool:
    """Whether all of the updates are visible."""
    return bool((caller.fetch(("item", keys.tolist())).rows[0] == -1.0).all())
