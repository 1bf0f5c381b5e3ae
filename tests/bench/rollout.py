"""`python -m tests.bench.rollout --release DIR`: a running stack goes from one release to another and back under load.

`trirank up` with two gateways and two replicas of each ranker; clients ask without a pause while another release goes
up, to 30 %, 50 %, everybody and back to nobody, and one of its edge replicas is killed on the way. Every reply is held
against the release it names, and every request against the tiers' own logs: what each of them says it answered, for
which release. Ends with status 1 when a request fails, or when parts of two releases answered one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.directory import read_directory
from infra.release import Release, read_release
from tests.bench.gray_load import Operator
from tests.clients import clients
from tests.derived_release import derived_release
from tests.running_stack import RunningStack
from tests.support import eventually

CLIENTS = 4
OPTIONS = ("--gateways", "2", "--edge-replicas", "2", "--rerank-replicas", "2")
STORY_S = 3600.0
_ANSWERED = re.compile(rb" answered role=([a-z]+) release=(\S+) trace=(r-\d+)\b")


def main() -> int:
    """Run it once."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.rollout", description=__doc__)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--requests", type=int, default=20_000, help="how many are sent at least (20,000)")
    given = options.parse_args()
    # Two folders, because the paths of Ray's sockets must stay short.
    made = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    with made(prefix="trirank-rollout-") as folder, made(prefix="ray-") as rays:
        other = derived_release(read_release(given.release), Path(folder) / "other")
        settings = {"TRIRANK_LOG_LEVEL": "DEBUG", "RAY_TMPDIR": rays}
        stack = RunningStack(given.release, Path(folder) / "home", *OPTIONS, settings=settings).start()
        try:
            return _Rollout(stack, other, Path(rays), given.requests).run()
        finally:
            stack.stop()


class _Rollout:
    def __init__(self, stack: RunningStack, other: Release, rays: Path, requests: int) -> None:
        self._stack = stack
        self._stable = read_release(stack.release)
        self._other = other
        self._rays = rays
        self._requests = requests
        self._operator = Operator(stack)
        self._load = _Load(stack.url, {release.manifest.name: release for release in (self._stable, other)})

    def run(self) -> int:
        """The exit status."""
        load, part, began_s = self._load, self._requests // 10, time.monotonic()
        with load.flowing():
            load.more(part)
            self._operator.start(self._plan(part))
            load.more(part)
            killed = self._kill_edge()
            eventually(lambda: self._operator.now()["state"] == "promoted", timeout_s=STORY_S, every_s=0.5)
            load.more(3 * part)
            status, said = self._operator.ask("POST", "/g:rollback", {"why": "back"})
            assert status == 200, said
            load.more(max(part, self._requests - load.sent))
        took_s, told = time.monotonic() - began_s, self._told()
        by = {trace: {release for _, release in found} for trace, found in told.items()}
        both = {trace for trace, releases in by.items() if len(releases) > 1}
        elsewhere = {trace for trace, releases in by.items() if load.served.get(trace) not in releases}
        roles = {trace: {role for role, _ in found} for trace, found in told.items()}
        unseen = {trace for trace in load.whole if roles.get(trace) != {"shard", "edge", "rerank"}}
        wrong = [load.failed, load.mixed, both, elsewhere, unseen]
        print(
            f"{load.sent} requests in {took_s:.0f} s, {dict(Counter(load.served.values()))}, edge replica {killed} "
            f"killed\nfailed {len(load.failed)}; by the replies' versions mixed {len(load.mixed)}; degraded "
            f"{dict(load.degraded)}\nby the tiers' logs: answered by tiers of both releases {len(both)}, of another "
            f"than the reply says {len(elsewhere)}, not known to all three {len(unseen)}",
            *(f"\n  {one!r}" for found in wrong for one in list(found)[:3]),
            flush=True,
        )
        return 1 if any(wrong) else 0

    def _plan(self, samples: int) -> dict[str, Any]:
        steps = [{"weight_ppm": w, "hold_s": 2, "min_samples": max(30, samples // 4)} for w in (300_000, 500_000)]
        return {
            "name": "g", "stable": self._stable.manifest.name, "candidate": self._other.manifest.name,
            "path": str(self._other.path), "steps": steps, "auto_promote": True,
            "gates": [{"metric": "error_share", "limit": 0.01}],
        }  # fmt: skip

    def _kill_edge(self) -> int:
        mine = [
            entry.pid
            for entry in read_directory(self._stack.state()["redis"], "trirank")
            if entry.role == "edge" and entry.release == self._other.manifest.name
        ]
        assert len(mine) == 2, mine
        os.kill(mine[0], signal.SIGKILL)
        return mine[0]

    def _told(self) -> dict[str, set[tuple[str, str]]]:
        """Tier and release of everybody who says he has answered it, for every request."""
        told: dict[str, set[tuple[str, str]]] = {}
        logs = self._rays / "trirank-ray-*" / "session_2*" / "logs"
        # What Serve has started writes to files of Serve, the shards' actors to those of Ray's workers.
        for file in (Path(name) for part in ("worker-*.err", "serve/*.log") for name in glob(str(logs / part))):
            for role, release, trace in _ANSWERED.findall(file.read_bytes()):
                told.setdefault(trace.decode(), set()).add((role.decode(), release.decode()))
        return told


class _Load:
    """Clients that ask without a pause, each request under a name of its own; every reply is checked."""

    def __init__(self, url: str, releases: dict[str, Release]) -> None:
        self._at = urlsplit(url)
        self._releases = releases
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.served: dict[str, str] = {}
        self.whole: set[str] = set()
        self.degraded: Counter[str] = Counter()
        self.failed: list[object] = []
        self.mixed: list[object] = []

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """While the block runs."""
        with clients(self._stopping, [self._client] * CLIENTS):
            yield

    def more(self, n: int) -> None:
        """Return when so many more requests were sent."""
        until = self.sent + n
        eventually(lambda: self.sent >= until, timeout_s=STORY_S)

    def _client(self) -> None:
        connection = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=30)
        while not self._stopping.is_set():
            with self._lock:
                self.sent += 1
                number = self.sent
            try:
                body = {"user_id": f"p{number % 5000}", "request_id": f"r-{number}", "k": 10, "deadline_ms": 5000}
                connection.request("POST", "/v1/recommend", json.dumps(body))
                reply = connection.getresponse()
                self._check(reply.status, f"r-{number}", reply.read())
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(error)
                connection.close()
        connection.close()

    def _check(self, status: int, trace: str, raw: bytes) -> None:
        if status != 200:
            self.failed.append((status, raw))
            return
        body = json.loads(raw)
        manifest, found = self._releases[body["release"]["id"]].manifest, body["versions"]
        self.served[trace] = manifest.name
        self.degraded.update(body["degraded"]["reasons"])
        if not body["degraded"]["value"]:
            self.whole.add(trace)
        # A stage that did not answer in time has no version.
        if not (
            found["generation"] == manifest.generation
            and manifest.files["edge/mlp.fp32.onnx"].startswith(found["edge"] or "")
            and manifest.files["rerank/bst.fp32.onnx"].startswith(found["rerank"] or "")
        ):
            self.mixed.append(body)


if __name__ == "__main__":
    sys.exit(main())
