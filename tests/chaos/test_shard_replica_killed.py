"""kill -9 of each replica of a shard in turn, in a running stack: no reply is degraded, and Ray brings it back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from infra.lifecycle import alive
from tests.chaos.test_any_process_killed import BACK_S, Traffic
from tests.running_stack import RunningStack
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def shards(stack: RunningStack) -> list[dict[str, Any]]:
    """The live shard processes, the first replica first."""
    entries = stack.get("/v1/status").body["processes"]
    live = [entry for entry in entries if entry["role"] == "shard" and alive(int(entry["pid"]))]
    return sorted(live, key=lambda entry: int(entry["replica"]))


def test_a_shard_with_a_replica_is_killed_and_no_reply_is_degraded(release_dir: Path, tmp_path: Path) -> None:
    stack = RunningStack(release_dir, tmp_path / "home", "--shard-replicas", "2", "--gateways", "1")
    stack.start()
    traffic = Traffic(stack)
    thread = threading.Thread(target=traffic.run)
    try:
        assert [entry["replica"] for entry in shards(stack)] == [0, 1]
        thread.start()
        eventually(lambda: traffic.whole_in_a_row >= 20, timeout_s=BACK_S)
        traffic.reasons.clear()
        for replica in (0, 1):
            pid = int(shards(stack)[replica]["pid"])
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not alive(pid))
            eventually(lambda: len(shards(stack)) == 2 and all(e["live"] for e in shards(stack)), timeout_s=BACK_S)
        eventually(lambda: traffic.whole_in_a_row >= 20, timeout_s=BACK_S)
    finally:
        traffic.stop()
        if thread.is_alive():
            thread.join()
        status = stack.stop()
    assert traffic.reasons["embeddings"] == 0
    assert set(traffic.statuses) == {200}
    assert status == 0, stack.log
