"""The guard: whatever way the supervisor ends, nothing it started lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.lifecycle import alive, descendants
from tests.support import eventually

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="subreapers are Linux's")

# A supervisor that starts a child in a session of its own, which starts a grandchild, and says their pids.
SUPERVISOR = """
import os, subprocess, sys, time
code = (
    "import subprocess, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
    "print(p.pid, flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, text=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid} {child.stdout.readline().strip()}\\n")
time.sleep(600)
"""
GUARD = "import sys; from infra.lifecycle import guard; sys.exit(guard([sys.executable, '-c', *sys.argv[1:]]))"


def _start(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    pids = tmp_path / "pids"
    guard = subprocess.Popen([sys.executable, "-c", GUARD, SUPERVISOR, str(pids)])
    text = eventually(lambda: pids.exists() and pids.read_text().endswith("\n") and pids.read_text())
    return guard, [int(pid) for pid in str(text).split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervisor_that_dies_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    guard, pids = _start(tmp_path)
    assert sorted(descendants(guard.pid)) == sorted(pids)
    os.kill(pids[0], how)
    guard.wait(timeout=10)
    eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_stop_of_the_guard_stops_everything(tmp_path: Path) -> None:
    guard, pids = _start(tmp_path)
    guard.send_signal(signal.SIGTERM)
    guard.wait(timeout=10)
    eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_killed_guard_makes_its_supervisor_stop(tmp_path: Path) -> None:
    guard, pids = _start(tmp_path)
    guard.kill()
    guard.wait(timeout=10)
    eventually(lambda: not alive(pids[0]))
    for orphan in pids[1:]:  # this supervisor stops nothing itself; the real one does
        os.kill(orphan, signal.SIGKILL)
