"""A real stack as a subprocess, for the end-to-end and chaos suites and the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import eventually, free_port

READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (lower case) and decoded body of one reply."""

    status: int
    headers: dict[str, str]
    body: Any


def http(method: str, url: str, body: object | bytes | None = None, *, timeout_s: float = 10.0) -> Answer:
    """One HTTP request; JSON bodies are decoded, error statuses are answers like others."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return _answer(reply.status, reply.headers.items(), reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.headers.items(), error.read())


def _answer(status: int, headers: Any, raw: bytes) -> Answer:
    named = {k.lower(): v for k, v in headers}
    is_json = "json" in named.get("content-type", "")
    return Answer(status, named, json.loads(raw) if is_json else raw.decode())


def _environment() -> dict[str, str]:
    """This environment without settings of a stack: tests name their own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIRANK_")}


def trirank(
    *arguments: str, timeout_s: float = 300.0, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; `settings` are further variables."""
    return subprocess.run(
        [sys.executable, "-m", "infra.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**_environment(), **(settings or {})},
    )


class RunningStack:
    """`trirank up` in its own home folder and on a free port; `settings` are further variables."""

    def __init__(self, release: Path, home: Path, *options: str, settings: Mapping[str, str] | None = None) -> None:
        self.release = release
        self.home = home
        self.options = options
        self._settings = dict(settings or {})
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Pid of the guard, the parent of everything."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything the stack has printed."""
        return (self.home / "up.log").read_text(errors="replace")

    def start(self) -> RunningStack:
        """Start and wait until it is ready."""
        self.home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "infra.cli", "up", "--release", str(self.release), "--home", str(self.home)]
        with (self.home / "up.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port), *self.options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**_environment(), **self._settings},
            )
        eventually(self._ready, timeout_s=READY_S, every_s=0.1)
        return self

    def _ready(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"`trirank up` ended with {self._process.returncode}:\n{self.log}")
        return "Trirank is ready" in self.log

    def stop(self) -> int:
        """Stop in order and return the exit status; killed when that takes too long."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait until it has ended by itself."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.wait(timeout=timeout_s)

    def get(self, path: str) -> Answer:
        """GET a path."""
        return http("GET", self.url + path)

    def post(self, path: str, body: object) -> Answer:
        """POST a JSON body."""
        return http("POST", self.url + path, body)

    def state(self) -> dict[str, Any]:
        """What the running stack wrote about itself."""
        return dict(json.loads((self.home / "run" / "state.json").read_text()))
