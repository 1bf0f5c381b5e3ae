"""`trirank snapshot` and `trirank updates tail|deadletters` on a running stack; growing its shards by a command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from infra.kafka import LogProducer
from tests.running_stack import RunningStack, trirank
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def publish_rows(folder: Path, home: Path, value: float, *words: str) -> None:
    """Give the rows of ten items the value."""
    file = folder / "rows.npz"
    np.savez(file, ids=[str(n) for n in range(1, 11)], rows=np.full((10, dim_of(home)), value, np.float32))
    done = trirank("updates", "publish", str(file), *words, "--home", str(home))
    assert done.returncode == 0, done.stderr


def dim_of(home: Path) -> int:
    release = Path(json.loads((home / "run" / "state.json").read_text())["release"])
    tables = json.loads((release / "manifest.json").read_text())["tables"]
    return next(int(table["dim"]) for table in tables if table["name"] == "item")


def test_updates_and_dead_letters_can_be_read(stack: RunningStack, tmp_path: Path) -> None:
    publish_rows(tmp_path, stack.home, 0.5, "--wait")
    lines = trirank("updates", "tail", "--json", "--home", str(stack.home)).stdout.splitlines()
    seen = [json.loads(line) for line in lines]
    assert sum(about["rows"] for about in seen if about.get("table") == "item") >= 10
    producer = LogProducer(stack.state()["kafka"])
    producer.start()
    try:
        producer.send(f"{stack.state()['stack']}.embeddings", 0, b"rubbish").result(10)
    finally:
        producer.close()

    def letters() -> str:
        return trirank("updates", "deadletters", "--home", str(stack.home)).stdout

    assert "truncated" in eventually(lambda: letters() if "truncated" in letters() else "", timeout_s=30)


def test_a_snapshot_is_saved_listed_and_found_sound(stack: RunningStack, tmp_path: Path) -> None:
    publish_rows(tmp_path, stack.home, 0.25, "--wait")
    saved = trirank("snapshot", "save", "--full", "--home", str(stack.home))
    assert saved.returncode == 0, saved.stderr
    assert "shard 0: snap-" in saved.stdout
    assert "(full, " in saved.stdout
    listed = json.loads(trirank("snapshot", "list", "--json", "--home", str(stack.home)).stdout)
    assert listed[-1]["kind"] == "full"
    verified = trirank("snapshot", "verify", "--home", str(stack.home))
    assert verified.returncode == 0, verified.stdout
    refused = trirank("snapshot", "restore", "--shards", "2", "--home", str(stack.home))
    assert (refused.returncode, "trirank down" in refused.stderr) == (2, True)


def test_a_stack_comes_up_with_another_number_of_shards_and_all_its_rows(release_dir: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for shards, value in ((1, 1.0), (2, 0.0)):
        stack = RunningStack(release_dir, home, "--shards", str(shards), "--gateways", "1")
        stack.start()
        try:
            if value:
                publish_rows(tmp_path, home, value, "--wait")
            else:
                # Nothing of this is in the new broker's log: the rows come from the snapshots of the one shard.
                done = trirank("snapshot", "save", "--full", "--home", str(home), "--json")
                restored = {index: about["restored_from"] for index, about in json.loads(done.stdout).items()}
                assert all(source.startswith("of-1/shard-0/snap-") for source in restored.values()), restored
                assert set(restored) == {"0", "1"}
        finally:
            assert stack.stop() == 0, stack.log
