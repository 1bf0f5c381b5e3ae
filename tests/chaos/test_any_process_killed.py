"""kill -9 of any one process: requests go on as promised, and the process is back without a hand."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.lifecycle import alive
from infra.release import read_release
from tests.running_stack import RunningStack, trirank
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
BACK_S = 60.0


class Traffic:
    """One client asking all the time; counts statuses and degraded reasons.

    Its deadline is long, so that what is degraded is so for the process that died and not for the load of its restart.
    """

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._done = threading.Event()
        self.statuses: Counter[int | str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.whole_in_a_row = 0

    def run(self) -> None:
        """Ask until stopped."""
        turn = 0
        while not self._done.is_set():
            turn += 1
            try:
                answer = self._stack.post(
                    "/v1/recommend", {"user_id": str(turn % 900 + 1), "k": 20, "deadline_ms": 3000}
                )
            except OSError as error:
                self.statuses[type(error).__name__] += 1
                continue
            self.statuses[answer.status] += 1
            if answer.status == 200:
                reasons = answer.body["degraded"]["reasons"]
                self.reasons.update(reasons)
                self.whole_in_a_row = 0 if reasons else self.whole_in_a_row + 1

    def stop(self) -> None:
        """Make `run` return."""
        self._done.set()


@contextmanager
def _traffic(stack: RunningStack) -> Iterator[Traffic]:
    traffic = Traffic(stack)
    thread = threading.Thread(target=traffic.run)
    thread.start()
    try:
        _not_degraded(traffic)
        traffic.reasons.clear()
        yield traffic
    finally:
        traffic.stop()
        thread.join()


def _entries(stack: RunningStack, role: str) -> list[dict[str, Any]]:
    """What the directory has of a role; nothing while the gateway that was asked is the one that dies."""
    try:
        answer = stack.get("/v1/status")
    except OSError:
        return []
    assert answer.status == 200, answer.body
    return [entry for entry in answer.body["processes"] if entry["role"] == role]


def _ready(stack: RunningStack) -> bool:
    try:
        return stack.get("/readyz").status == 200
    except OSError:
        return False


def _kill_one(stack: RunningStack, role: str) -> int:
    pid = int(_entries(stack, role)[0]["pid"])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))
    return pid


def _whole_again(stack: RunningStack, role: str, dead: int, traffic: Traffic) -> None:
    """A new process of that role serves, and replies are not degraded any more."""
    eventually(
        lambda: [e for e in _entries(stack, role) if int(e["pid"]) != dead and alive(int(e["pid"]))], timeout_s=BACK_S
    )
    eventually(lambda: _ready(stack), timeout_s=BACK_S)
    _not_degraded(traffic)


def _not_degraded(traffic: Traffic) -> None:
    """Enough whole replies in a row that every gateway has given some: each asks on a new connection."""
    traffic.whole_in_a_row = 0
    eventually(lambda: traffic.whole_in_a_row >= 50, timeout_s=BACK_S)


@pytest.mark.parametrize(
    ("role", "reason"), [("rerank", "rerank"), ("edge", "edge"), ("shard", "embeddings"), ("events", None)]
)
def test_a_killed_tier_fails_no_request_and_comes_back(stack: RunningStack, role: str, reason: str | None) -> None:
    with _traffic(stack) as traffic:
        dead = _kill_one(stack, role)
        if reason is not None:
            eventually(lambda: traffic.reasons[reason] > 0)
        _whole_again(stack, role, dead, traffic)
    assert set(traffic.statuses) == {200}
    assert set(traffic.reasons) <= {reason}
    # What Ray has to say about it is in the stack's own file.
    assert "(raylet)" not in stack.log


def test_a_killed_gateway_drops_only_what_it_held_and_comes_back(stack: RunningStack) -> None:
    assert len(_entries(stack, "gateway")) == 2
    with _traffic(stack) as traffic:
        dead = _kill_one(stack, "gateway")
        eventually(lambda: len([e for e in _entries(stack, "gateway") if int(e["pid"]) != dead]) == 2, timeout_s=BACK_S)
        _whole_again(stack, "gateway", dead, traffic)
    broken = sum(n for status, n in traffic.statuses.items() if status != 200)
    assert broken <= 1, traffic.statuses  # one client: at most the one request the dead gateway was answering


def test_a_killed_redis_costs_the_history_only_and_comes_back(stack: RunningStack) -> None:
    with _traffic(stack) as traffic:
        dead = stack.state()["redis_pid"]
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: stack.state()["redis_pid"] != dead, timeout_s=BACK_S)
        eventually(lambda: _ready(stack), timeout_s=BACK_S)
        _not_degraded(traffic)
    assert set(traffic.statuses) == {200}
    assert set(traffic.reasons) <= {"history"}


def test_a_killed_broker_stops_no_request_and_feedback_is_taken_again(stack: RunningStack, tmp_path: Path) -> None:
    rows = read_release(stack.release).table("item")
    np.savez(tmp_path / "same.npz", keys=rows.keys[:1], rows=rows.rows[:1])
    done = trirank("updates", "publish", str(tmp_path / "same.npz"), "--home", str(stack.home), "--wait")
    assert done.returncode == 0, done.stderr
    event = {"events": [{"user_id": "7", "item_id": "50", "event": "click"}]}
    assert stack.post("/v1/feedback", event).status == 202
    with _traffic(stack) as traffic:
        dead = stack.state()["kafka_pid"]
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: stack.state()["kafka_pid"] != dead, timeout_s=BACK_S)
        eventually(lambda: stack.post("/v1/feedback", event).status == 202, timeout_s=BACK_S)
        eventually(lambda: _ready(stack), timeout_s=BACK_S)
        # The embedded broker keeps its log in memory: the stack notices that it is gone and says so.
        eventually(lambda: stack.get("/v1/status").body["shards"][0]["log_losses"] == 1, timeout_s=BACK_S)
    assert set(traffic.statuses) == {200}
    assert set(traffic.reasons) == set()
