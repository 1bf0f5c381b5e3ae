"""What the benches of gray release share: an operator, and clients that ask at a steady rate on a running stack."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.clients import clients
from tests.running_stack import RunningStack
from tests.support import eventually

CLIENTS = 8


class Operator:
    """Calls the release API of a stack."""

    def __init__(self, stack: RunningStack) -> None:
        self._at = urlsplit(stack.url)
        self._token = (stack.home / "control-token").read_text()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body."""
        connection = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=30)
        headers = {
            "authorization": f"Bearer {self._token}", "if-match": "*", "idempotency-key": uuid.uuid4().hex,
        }  # fmt: skip
        try:
            connection.request(method, f"/v1/releases{path}", None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def start(self, plan: dict[str, Any]) -> None:
        """Create and start; returns when the candidate release is shown (or shadows)."""
        status, said = self.ask("POST", "", plan)
        assert status == 201, said
        eventually(lambda: self.ask("POST", f"/{plan['name']}:start")[0] == 200, timeout_s=180, every_s=0.2)

    def end(self, name: str) -> None:
        """Abort; one that is aborted stays so."""
        self.ask("POST", f"/{name}:abort", {"why": "the measurement is over"})

    def now(self) -> dict[str, Any]:
        """The current gray release."""
        return dict(self.ask("GET", "")[1]["releases"][0])


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it was sent and answered (monotonic), by which arm, with which status, and whether whole."""

    sent_s: float
    done_s: float
    arm: str
    status: int
    degraded: bool


class Paced:
    """`rate` requests a second together, each client on its own connection; one that is late skips nothing."""

    def __init__(self, url: str, rate: float) -> None:
        self._at = urlsplit(url)
        self._every_s = CLIENTS / rate
        self._stopping = threading.Event()
        self.asked: list[Asked] = []

    @contextmanager
    def flowing(self) -> Iterator[Paced]:
        """While the block runs."""
        with clients(self._stopping, (partial(self._client, n) for n in range(CLIENTS))):
            yield self

    def between(self, from_s: float, to_s: float) -> list[Asked]:
        """Requests sent in a span of time."""
        return [asked for asked in list(self.asked) if from_s <= asked.sent_s < to_s]

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=10)
        user, next_s = number, time.monotonic() + self._every_s * number / CLIENTS
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s += self._every_s
            user += CLIENTS
            sent_s = time.monotonic()
            try:
                connection.request("POST", "/v1/recommend", json.dumps({"user_id": f"p{user}", "k": 20}))
                reply = connection.getresponse()
                raw = reply.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.asked.append(Asked(sent_s, time.monotonic(), "", 0, True))
                continue
            degraded = b'"degraded":{"value":true' in raw
            arm = reply.headers["x-release-arm"] or ""
            self.asked.append(Asked(sent_s, time.monotonic(), arm, reply.status, degraded))
        connection.close()


def quantile_ms(asked: list[Asked], q: float) -> float:
    """A quantile of the time from sent to answered."""
    return float(np.quantile([1e3 * (one.done_s - one.sent_s) for one in asked], q)) if asked else float("nan")
