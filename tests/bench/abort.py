"""`python -m tests.bench.abort --release DIR`: how long an abort takes on a running stack, four gateways under load.

Each round starts a gray release at 50 % and aborts it. The time is from the abort call to the last reply of the
candidate release has been read; the clients share one interpreter, so they read some replies later than they came. A
request that is sent after the call has returned and is answered by the candidate release is a fault. Ends with status 1
when a figure is not as said.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from infra.release import read_release
from tests.derived_release import derived_release
from tests.running_stack import RunningStack
from tests.support import eventually

GATEWAYS, CLIENTS = 4, 4


def main() -> int:
    """Run the rounds and print what was found."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.abort", description=__doc__)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=200)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trirank-abort-", ignore_cleanup_errors=True) as folder:
        release = read_release(given.release)
        good = derived_release(release, Path(folder) / "good")
        stack = RunningStack(given.release, Path(folder) / "home", "--gateways", str(GATEWAYS)).start()
        try:
            return _measure(stack, release.manifest.name, good.path, given.rounds)
        finally:
            stack.stop()


class Client(threading.Thread):
    """Asks without a pause; keeps when each request was sent, when its reply was read, and the arm."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._at = urlsplit(url)
        self._number = number
        self.stopping = threading.Event()
        self.replies: list[tuple[float, float, str]] = []
        self.failed = 0

    def run(self) -> None:
        """Until told to stop."""
        i = self._number
        while not self.stopping.is_set():
            connection = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=10)
            for _ in range(20):
                i += CLIENTS
                sent_s = time.monotonic()
                connection.request("POST", "/v1/recommend", json.dumps({"user_id": i, "k": 5}))
                reply = connection.getresponse()
                reply.read()
                self.replies.append((sent_s, time.monotonic(), reply.headers["x-release-arm"] or ""))
                self.failed += reply.status != 200
            connection.close()


def _measure(stack: RunningStack, stable: str, good: Path, rounds: int) -> int:
    headers = {"authorization": f"Bearer {(stack.home / 'control-token').read_text()}"}

    def ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
        at = urlsplit(stack.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
        given = {**headers, "if-match": "*", "idempotency-key": uuid.uuid4().hex}
        connection.request(method, f"/v1/releases{path}", None if body is None else json.dumps(body), given)
        reply = connection.getresponse()
        answer = reply.status, json.loads(reply.read())
        connection.close()
        return answer

    clients = [Client(stack.url, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    took_ms, pushed_ms, late, unacknowledged = [], [], 0, 0
    for number in range(rounds):
        plan = {
            "name": f"g{number}", "stable": stable, "candidate": "good", "path": str(good), "gates": [],
            "steps": [{"weight_ppm": 500_000, "hold_s": 600}],
        }  # fmt: skip
        assert ask("POST", "", plan)[0] == 201
        eventually(lambda name=plan["name"]: ask("POST", f"/{name}:start")[0] == 200, timeout_s=120)
        began_s = time.monotonic()
        eventually(lambda since=began_s: any(c.replies and _last(c, since) for c in clients), timeout_s=30)
        called_s = time.monotonic()
        status, body = ask("POST", f"/{plan['name']}:abort")
        returned_s = time.monotonic()
        assert status == 200, body
        said = body["acknowledged"]
        unacknowledged += said["acked"] < GATEWAYS
        pushed_ms.append(said["propagation_ms"])
        eventually(lambda since=returned_s: all(c.replies[-1][1] > since + 0.2 for c in clients), timeout_s=30)
        shown = [(sent, at) for c in clients for sent, at, arm in c.replies if arm == "candidate"]
        seen = [at for _, at in shown if at > called_s]
        took_ms.append(1e3 * (max(seen, default=called_s) - called_s))
        late += sum(sent > returned_s for sent, _ in shown)
        for c in clients:
            c.replies = c.replies[-1:]
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join()
    p50, p99 = np.percentile(took_ms, [50, 99])
    print(f"abort -> last reply of the candidate release: p50 {p50:.0f} ms, p99 {p99:.0f} ms, {rounds} aborts")
    print(f"abort -> every one of {GATEWAYS} gateways has said so: p50 {np.percentile(pushed_ms, 50):.0f} ms, "
          f"p99 {np.percentile(pushed_ms, 99):.0f} ms; not by all in {unacknowledged}")  # fmt: skip
    failed = sum(client.failed for client in clients)
    print(f"requests sent after the call had returned that it answered: {late}; failed requests: {failed}")
    return 0 if p99 <= 1000 and not late and not failed and not unacknowledged else 1


def _last(client: Client, since_s: float) -> bool:
    return any(arm == "candidate" for _, at, arm in client.replies[-20:] if at > since_s)


if __name__ == "__main__":
    sys.exit(main())
