"""Processes of a stack: guarded start, orderly stop, nothing left behind.

`trirank up` is two processes. The guard is thin and does nothing but wait: it is the subreaper (Linux,
`prctl(2)` PR_SET_CHILD_SUBREAPER) of everything the stack starts, so whatever way the supervisor ends, its orphans
become the guard's children and are ended by it. Should the guard be killed, the supervisor gets SIGTERM from the
kernel (PR_SET_PDEATHSIG) and stops in order. On systems without prctl the guard ends only its direct child.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform.startswith("linux")


def guard(command: Sequence[str], *, stop_timeout_s: float = 25.0) -> int:
    """Run `command` as the supervisor of a stack and return its exit status; afterwards no descendant is alive.

    SIGTERM and SIGINT are passed on once; a second one, or `stop_timeout_s` without an end, kills.
    """
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent)
    stops: list[float] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stops.append(time.monotonic())
        child.send_signal(signal.SIGTERM if len(stops) == 1 else signal.SIGKILL)

    previous = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        status = _wait(child, stops, stop_timeout_s)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        end_descendants(os.getpid())
    return status


def _wait(child: subprocess.Popen[bytes], stops: list[float], stop_timeout_s: float) -> int:
    while True:
        try:
            return child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stops and time.monotonic() - stops[0] > stop_timeout_s:
                logger.warning("supervisor did not stop in time and is killed")
                child.kill()


def descendants(pid: int) -> list[int]:
    """Pids of all living descendants of `pid`, children before grandchildren. Empty where /proc is missing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name may hold spaces and brackets: fields are counted from the last bracket.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = list(children.get(pid, []))
    for parent in found:
        found.extend(children.get(parent, []))
    return found


def end_descendants(pid: int, *, timeout_s: float = 5.0) -> None:
    """Kill every descendant of `pid` and reap those that became its children."""
    end = time.monotonic() + timeout_s
    while (left := descendants(pid)) and time.monotonic() < end:
        for orphan in left:
            try:
                os.kill(orphan, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at SIGTERM, SIGINT and SIGHUP."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: stop())


def alive(pid: int) -> bool:
    """Whether a process with this pid exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not stat.parent.parent.exists()


def _die_with_parent() -> None:
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
