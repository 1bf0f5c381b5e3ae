"""Nobody sees the candidate release after an abort has returned: not through a gateway that was stopped meanwhile, not
from an answer that was begun before. While Redis refuses everybody the split stands still."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from infra.redis import connect
from reranker.gray.arms import LEASE_S
from tests.clients import clients
from tests.gateway_process import gateway_process
from tests.gateway_stack import STACK
from tests.support import eventually, free_port
from tests.two_releases import TwoReleases, versions

HALF = [{"weight_ppm": 500_000, "hold_s": 600}]
CLIENTS = 4


def ask(port: int, user: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/recommend", json.dumps({"user_id": user, "deadline_ms": 60_000}))
        reply = connection.getresponse()
        assert reply.status == 200
        return json.loads(reply.read())
    finally:
        connection.close()


class Asking:
    """Clients of one gateway that ask all the time; each keeps its replies in order."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopping = threading.Event()
        self.replies: list[Any] = []

    @contextmanager
    def flowing(self) -> Iterator[Asking]:
        with clients(self._stopping, (partial(self._client, n) for n in range(CLIENTS))):
            yield self

    def _client(self, at: int) -> None:
        while not self._stopping.is_set():
            self.replies.append(ask(self._port, f"w{at}"))
            at += CLIENTS

    def arms(self, since: int) -> set[str]:
        return {body["release"]["arm"] for body in self.replies[since:]}


def test_a_gateway_that_was_stopped_during_the_abort_serves_nothing_of_it_when_it_goes_on(two: TwoReleases) -> None:
    port = free_port()
    with gateway_process(replace(two.stack.config(), port=port)) as process:
        eventually(lambda: len(gateways(two)) == 2)
        two.started(steps=HALF)
        with Asking(port).flowing() as asking:
            eventually(lambda: asking.arms(0) == {"stable", "candidate"})
            # Its clients wait for answers of the candidate release that are made while it is stopped.
            two.tiers["edge"].hold.clear()
            waiting = len(two.tiers["edge"].requests)
            eventually(lambda: len(two.tiers["edge"].requests) > waiting)
            os.kill(process.pid, signal.SIGSTOP)
            two.tiers["edge"].hold.set()
            aborted = two.control("POST", "/g:abort", {"why": "enough"})
            assert aborted.status == 200
            assert (aborted.body["acknowledged"]["acked"], aborted.body["acknowledged"]["gateways"]) == (1, 2)
            [missing] = aborted.body["acknowledged"]["missing"]
            assert str(process.pid) in missing

            before = len(asking.replies)
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: len(asking.replies) > before + 20 * CLIENTS)
            assert asking.arms(before) == {"stable"}
        assert {body["release"]["reason"] for body in asking.replies[-10:]} == {"aborted"}


def gateways(two: TwoReleases) -> list[str]:
    with connect(two.stack.redis.url) as redis:
        return [name.decode() for name in redis.hkeys(f"{STACK}:gray:acks")]


def test_an_answer_begun_before_the_abort_is_made_by_stable_instead(two: TwoReleases) -> None:
    two.started(steps=HALF)
    user = next(i for i in range(100) if versions(two.ask([i])[0])[1] == "candidate")
    edge = two.tiers["edge"]
    asked, found = len(edge.requests), list[Any]()
    edge.hold.clear()

    def begin() -> threading.Thread:
        waiting = threading.Thread(target=lambda: found.append(ask(two.stack.port, f"v{user}")))
        waiting.start()
        eventually(lambda: len(edge.requests) > asked or not waiting.is_alive())
        return waiting

    waiting = begin()
    try:
        # On a machine so busy that the lease runs out, stable answers him; then he asks again.
        while len(edge.requests) == asked:
            waiting = begin()
        aborted = two.control("POST", "/g:abort")
        assert (aborted.body["acknowledged"]["acked"], aborted.body["acknowledged"]["inflight"]) == (1, 1)
    finally:
        edge.hold.set()
        waiting.join()
    release = found[-1]["release"]
    assert (release["id"], release["arm"], release["reason"]) == ("tiny", "stable", "aborted")
    assert not found[-1]["degraded"]["value"]


def test_while_redis_refuses_the_split_stands_still_for_longer_than_the_lease_and_goes_on_afterwards(
    two: TwoReleases,
) -> None:
    two.started(steps=HALF)
    before = {i: two.ask([i])[0].body["release"]["arm"] for i in range(20)}
    with connect(two.stack.redis.url) as redis:
        version = redis.hget(f"{STACK}:gray", "version")
    assert set(before.values()) == {"stable", "candidate"}
    away = threading.Event()
    two.stack.redis.stop()
    for _ in range(6):
        away.wait(LEASE_S / 4)
        answers = {i: two.ask([i])[0] for i in range(20)}
        assert all(answer.status == 200 for answer in answers.values())
        assert {i: answer.body["release"]["arm"] for i, answer in answers.items()} == before
    assert two.control("POST", "/g:abort").status == 503

    two.stack.redis.start()
    two.stack.redis.wait_ready()
    with connect(two.stack.redis.url) as redis:
        assert redis.hget(f"{STACK}:gray", "version") == version
    assert eventually(lambda: two.control("POST", "/g:abort").body.get("state")) == "aborted"
    assert {versions(answer)[0] for answer in two.ask(range(20))} == {"tiny"}


def test_a_silent_redis_turns_the_candidate_release_off_until_it_answers(two: TwoReleases) -> None:
    two.started(steps=HALF)
    user = next(i for i in range(100) if versions(two.ask([i])[0])[1] == "candidate")

    def release() -> Any:
        return two.ask([user], deadline_ms=100)[0].body["release"]

    pid = two.stack.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: release()["reason"] == "fenced")
        assert (release()["id"], release()["arm"]) == ("tiny", "stable")
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: release()["arm"] == "candidate")
    assert two.stack.get("/v1/status").body["gateway"]["fenced"] is False
