"""A rollout from nobody to everybody and back under constant load, with a replica killed on the way: no failed request
and none that parts of two releases answered, by the replies and by what the tiers themselves were asked.

TEST_ROLLOUT_REQUESTS sets how many requests are sent at least (default 1,000).
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from infra.wire.messages import Request
from tests.clients import clients
from tests.gateway_stack import Answer
from tests.support import eventually
from tests.two_releases import TwoReleases

REQUESTS = int(os.environ.get("TEST_ROLLOUT_REQUESTS", "1000"))
CLIENTS = 4
STORY_S = 60.0 + REQUESTS / 20


class Journal(list[Request]):
    """What one tier of a release was asked, as trace ids in a journal all tiers share: the tensors are let go."""

    def __init__(self, seen: dict[str, set[str]], release: str) -> None:
        super().__init__()
        self._seen = seen
        self._release = release

    def extend(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.method != "health":
                self._seen.setdefault(request.trace_id, set()).add(self._release)


class Load:
    """Clients that ask without a pause, each request under a name of its own; every reply is checked."""

    def __init__(self, two: TwoReleases) -> None:
        self._two = two
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.releases: Counter[str] = Counter()
        self.failed: list[object] = []
        self.mixed: list[object] = []

    @contextmanager
    def flowing(self) -> Iterator[None]:
        with clients(self._stopping, [self._client] * CLIENTS):
            yield

    def more(self, n: int) -> None:
        """Return when so many more requests were answered."""
        until = self.sent + n
        eventually(lambda: self.sent >= until, timeout_s=STORY_S)

    def _client(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._two.stack.port, timeout=30)) as connection:
            while not self._stopping.is_set():
                with self._lock:
                    self.sent += 1
                    number = self.sent
                try:
                    self._ask(connection, number)
                except (OSError, http.client.HTTPException) as error:
                    self.failed.append(error)
                    connection.close()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        body = json.dumps({"user_id": f"r{number % 5000}", "request_id": f"r-{number}", "k": 5})
        connection.request("POST", "/v1/recommend", body)
        reply = connection.getresponse()
        answer = Answer(reply.status, {}, json.loads(reply.read()))
        if answer.status != 200:
            self.failed.append(answer)
            return
        self.releases[answer.body["release"]["id"]] += 1
        if self._two.mixed(answer):
            self.mixed.append(answer)


def test_a_rollout_to_everybody_and_back_fails_no_request_and_mixes_no_releases(tmp_path: Path) -> None:
    two = TwoReleases(tmp_path)
    seen: dict[str, set[str]] = {}
    try:
        two.start()
        spare = two.stack.tier("edge", 8, two.other)
        two.stack.more.append(spare)
        spare.start()
        for tier in two.stack.tiers.values():
            tier.requests = Journal(seen, "tiny")
        for tier in (*two.tiers.values(), spare):
            tier.requests = Journal(seen, "tiny-b")
        load = Load(two)
        with load.flowing():
            load.more(REQUESTS // 10)
            two.started(auto_promote=True)
            load.more(REQUESTS // 5)
            two.tiers["edge"].die()
            eventually(lambda: two.control("GET", "/g").body["state"] == "promoted", timeout_s=STORY_S)
            two.tiers["edge"].revive()
            load.more(REQUESTS // 5)
            assert two.control("POST", "/g:rollback", {"why": "back"}).status == 200
            load.more(max(REQUESTS // 5, REQUESTS - load.sent))
    finally:
        two.stack.stop()

    print(f"{load.sent} requests, {dict(load.releases)}; failed {len(load.failed)}, mixed {len(load.mixed)}")
    assert (load.failed, load.mixed) == ([], [])
    assert load.releases["tiny-b"] > REQUESTS // 10
    of_both = [trace for trace, releases in seen.items() if len(releases) > 1]
    assert len(seen) >= load.sent
    assert of_both == []
