"""Systems under measurement: started one at a time on a free port, ended with every process they started.

`Ours` is `trirank up` in a home folder of its own; a peer is its module under the same guard that `trirank up` uses.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from infra.lifecycle import descendants
from tests.running_stack import RunningStack
from tests.support import eventually, free_port

READY_S = 120.0
STOP_S = 40.0
_LOG_TAIL = 2000


class System(Protocol):
    """Something that answers `POST /v1/recommend`."""

    url: str

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Ours:
    """The product, with its embedded Redis and broker."""

    def __init__(self, release: Path, home: Path) -> None:
        self._stack = RunningStack(release, home)
        self.url = ""

    @property
    def pid(self) -> int:
        """The process everything else descends from."""
        return self._stack.pid

    def start(self) -> None:
        """Start and wait until it is ready."""
        self._stack.start()
        self.url = self._stack.url

    def stop(self) -> None:
        """Stop in order."""
        self._stack.stop()


class Peer:
    """One module of `tests.bench.peers`."""

    def __init__(self, module: str, release: Path, home: Path) -> None:
        self._module = module
        self._release = release
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """The process everything else descends from."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it is ready."""
        self._home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        module = f"tests.bench.peers.{self._module}"
        command = [sys.executable, "-m", module, "--release", str(self._release), "--port", str(port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.guarded", *command], stdout=log, stderr=log, start_new_session=True
            )
        eventually(lambda: self._ready(port), timeout_s=READY_S, every_s=0.1)

    def stop(self) -> None:
        """Stop in order; kill what does not."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise

    @property
    def _log(self) -> Path:
        return self._home / f"{self._module}.log"

    def _ready(self, port: int) -> bool:
        if self._process is not None and self._process.poll() is not None:
            tail = self._log.read_text(errors="replace")[-_LOG_TAIL:]
            raise RuntimeError(f"{self._module} ended with status {self._process.returncode}:\n{tail}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def cpu_s(pid: int) -> float:
    """CPU seconds all living descendants of a process have used; 0 where there is no /proc."""
    ticks = 0
    for child in descendants(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # utime and stime, fields 14 and 15 of proc(5); the first two are cut off here.
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def systems(release: Path, home: Path) -> dict[str, System]:
    """Every system by name; the first one is what the others are compared with."""
    return {
        "trirank": Ours(release, home / "trirank"),
        "ray-serve": Peer("serve_ray", release, home),
        "monolith": Peer("monolith", release, home),
    }
