"""The leader of a gray release is killed: another takes over within three seconds, no step twice, none lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from infra.redis import connect
from infra.release import read_release
from tests.derived_release import derived_release
from tests.running_stack import RunningStack, trirank
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

STEPS = [{"weight_ppm": weight, "hold_s": 3, "min_samples": 20} for weight in (300_000, 400_000, 500_000)]
PLAN = {"steps": STEPS, "gates": [{"metric": "error_share", "limit": 0.01}]}


def test_a_killed_leader_is_followed_by_another_and_the_ramp_goes_on(release_dir: Path, tmp_path: Path) -> None:
    good = derived_release(read_release(release_dir), tmp_path / "good")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    stack = RunningStack(release_dir, tmp_path / "home", "--gateways", "3").start()
    stopping, refused = threading.Event(), []

    def traffic() -> None:
        user = 0
        while not stopping.is_set():
            user += 1
            try:
                if stack.post("/v1/recommend", {"user_id": user, "k": 5}).status != 200:
                    refused.append(user)
            except OSError:
                pass  # the killed process held this connection

    client = threading.Thread(target=traffic)
    try:
        arguments = ("--plan", str(tmp_path / "plan.json"), "--name", "g", "--home", str(stack.home))
        started = trirank("release", "start", str(good.path), *arguments)
        assert started.returncode == 0, started.stderr
        client.start()
        with connect(stack.state()["redis"]) as redis:

            def leader() -> str:
                return (redis.get("trirank:gray:lease") or b"").decode()

            killed = eventually(leader)
            os.kill(int(killed.split("-")[1]), signal.SIGKILL)
            began_s = time.monotonic()
            eventually(lambda: leader() not in ("", killed), timeout_s=10)
            took_s = time.monotonic() - began_s
            print(f"another gateway leads after {took_s:.2f} s")
            assert took_s <= 3.0

        def steps() -> list[str]:
            shown = trirank("release", "history", "--json", "--home", str(stack.home))
            return [f"{event['action']} {event['step'] + 1}" for event in json.loads(shown.stdout or "[]")]

        eventually(lambda: len(steps()) >= 4, timeout_s=120, every_s=0.5)
        assert steps() == ["create 1", "start 1", "step 2", "step 3"]
        assert refused == []
    finally:
        stopping.set()
        if client.is_alive():
            client.join()
        assert stack.stop() == 0, stack.log
