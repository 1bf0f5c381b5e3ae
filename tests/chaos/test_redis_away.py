"""Redis goes away under load, in front of gateways that are processes of their own: every request is answered, and a
user keeps his arm for as long as nobody can have changed the split.

TEST_REDIS_AWAY_S is how long Redis is away (default 5 s, longer than a gateway's lease).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.redis import connect
from reranker.gray.arms import LEASE_S
from tests.clients import clients
from tests.gateway_process import gateway_process
from tests.gateway_stack import STACK
from tests.support import eventually, free_port
from tests.two_releases import TwoReleases

AWAY_S = float(os.environ.get("TEST_REDIS_AWAY_S", "5"))
GATEWAYS = 2
INF = float("inf")
CLIENTS = 2  # of each gateway
USERS = [f"a{i}" for i in range(60)]
QUARTER = [{"weight_ppm": 250_000, "hold_s": 600}]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one user was answered, and when he asked."""

    sent_s: float
    port: int
    user: str
    arm: str
    reason: str
    lacked: tuple[str, ...]


class Users:
    """Clients of every gateway that ask for all users in turn, without a pause."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._stopping = threading.Event()
        self.replies: list[Reply] = []
        self.failed: list[object] = []

    @contextmanager
    def asking(self) -> Iterator[Users]:
        """While the block runs."""
        with clients(self._stopping, (partial(self._client, port, n) for port in self.ports for n in range(CLIENTS))):
            yield self

    def between(self, since_s: float, until_s: float = INF) -> list[Reply]:
        """Answers to requests sent in this span."""
        return [reply for reply in list(self.replies) if since_s <= reply.sent_s < until_s]

    def arms(self, since_s: float) -> dict[tuple[int, str], set[str]]:
        """The arms every user had at every gateway, for requests sent since then."""
        found: dict[tuple[int, str], set[str]] = {}
        for reply in self.between(since_s):
            found.setdefault((reply.port, reply.user), set()).add(reply.arm)
        return found

    def _client(self, port: int, at: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            while not self._stopping.is_set():
                user, sent_s = USERS[at % len(USERS)], time.monotonic()
                at += CLIENTS
                try:
                    connection.request(
                        "POST", "/v1/recommend", json.dumps({"user_id": user, "k": 5, "deadline_ms": 300})
                    )
                    reply = connection.getresponse()
                    status, body = reply.status, json.loads(reply.read())
                except (OSError, http.client.HTTPException) as error:
                    self.failed.append(error)
                    connection.close()
                    continue
                if status != 200:
                    self.failed.append(body)
                    continue
                release, lacked = body["release"], tuple(body["degraded"]["reasons"])
                self.replies.append(Reply(sent_s, port, user, release["arm"], release["reason"], lacked))


@dataclass(frozen=True, slots=True)
class Scene:
    """Two releases, the candidate release at a quarter, and clients at every gateway process."""

    two: TwoReleases
    users: Users

    def version(self) -> Any:
        with connect(self.two.stack.redis.url) as redis:
            return redis.hget(f"{STACK}:gray", "version")

    def all_asked(self, since_s: float) -> dict[str, str]:
        """The arm of every user once all were answered by every gateway since then; each has one only."""
        found = eventually(
            lambda: len(arms := self.users.arms(since_s)) == GATEWAYS * len(USERS) and arms, timeout_s=60
        )
        arms: dict[str, str] = {}
        for (_, user), had in found.items():
            assert had == {arms.setdefault(user, min(had))}
        return arms


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    two = TwoReleases(tmp_path, gray_lease_s=getattr(request, "param", LEASE_S))
    with ExitStack() as stack:
        stack.callback(two.stack.stop)
        two.start()
        ports = [free_port() for _ in range(GATEWAYS)]
        for port in ports:
            stack.enter_context(gateway_process(replace(two.stack.config(), port=port)))
        with connect(two.stack.redis.url) as redis:
            eventually(lambda: redis.hlen(f"{STACK}:gray:acks") == GATEWAYS + 1, timeout_s=60)
        two.started(steps=QUARTER)
        yield Scene(two, stack.enter_context(Users(ports).asking()))


def lasting(seconds: float) -> None:
    """Wait while something is the matter."""
    end_s = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= end_s, timeout_s=seconds + 60)


@contextmanager
def silent(two: TwoReleases) -> Iterator[float]:
    """While the block runs Redis answers nobody and refuses nobody; since when."""
    pid = two.stack.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_dead_redis_moves_no_user_and_fails_no_request(scene: Scene) -> None:
    two, users = scene.two, scene.users
    before, version, pid = scene.all_asked(time.monotonic()), scene.version(), two.stack.redis.pid
    assert set(before.values()) == {"stable", "candidate"}
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    died_s = time.monotonic()
    lasting(AWAY_S)
    assert two.control("POST", "/g:abort").status == 503
    back_s = time.monotonic()
    two.stack.redis.restart()

    during = users.between(died_s, back_s)
    assert {reply.port for reply in users.between(died_s + LEASE_S, back_s)} == set(users.ports)
    assert any("history" in reply.lacked for reply in during)
    eventually(lambda: users.replies[-1].lacked == ())
    assert scene.all_asked(time.monotonic()) == before
    moved = {(reply.user, reply.reason) for reply in users.replies if reply.arm != before[reply.user]}
    print(
        f"\nRedis dead for {back_s - died_s:.1f} s: {len(during)} requests meanwhile to {GATEWAYS} gateways, "
        f"{sum(reply.arm == 'candidate' for reply in during)} of them the candidate release's, "
        f"{len(users.failed)} failed, {len(moved)} of {len(USERS)} users changed arm"
    )
    assert (users.failed, moved) == ([], set())
    assert scene.version() == version
    assert eventually(lambda: two.control("POST", "/g:abort").body.get("state")) == "aborted"
    assert set(scene.all_asked(time.monotonic()).values()) == {"stable"}


@pytest.mark.parametrize("scene", [AWAY_S + 10], indirect=True)
def test_a_lease_longer_than_the_silence_moves_no_user(scene: Scene) -> None:
    two, users = scene.two, scene.users
    before = scene.all_asked(time.monotonic())
    with silent(two) as fell_s:
        lasting(AWAY_S)
        back_s = time.monotonic()
    assert scene.all_asked(time.monotonic()) == before
    during, moved = users.between(fell_s, back_s), {r.user for r in users.replies if r.arm != before[r.user]}
    assert {reply.port for reply in during if reply.arm == "candidate"} == set(users.ports)
    print(
        f"\nRedis silent for {back_s - fell_s:.1f} s, lease {AWAY_S + 10:.0f} s: {len(during)} requests meanwhile to "
        f"{GATEWAYS} gateways, {len(users.failed)} failed, {len(moved)} of {len(USERS)} users changed arm"
    )
    assert (users.failed, moved) == ([], set())
    assert eventually(lambda: two.control("POST", "/g:abort").body.get("state")) == "aborted"
    assert set(scene.all_asked(time.monotonic()).values()) == {"stable"}


def test_a_silent_redis_moves_users_to_stable_only_and_fails_no_request(scene: Scene) -> None:
    two, users = scene.two, scene.users
    before = scene.all_asked(time.monotonic())
    with silent(two) as fell_s:
        lasting(AWAY_S)
        eventually(lambda: {reply.port for reply in users.between(fell_s + LEASE_S)} == set(users.ports))
        back_s = time.monotonic()

    assert {reply.arm for reply in users.between(fell_s + LEASE_S, back_s)} == {"stable"}
    for port in users.ports:
        eventually(lambda port=port: any(r.port == port and r.arm == "candidate" for r in users.between(back_s)))
    assert scene.all_asked(time.monotonic()) == before
    moved = {(reply.arm, reply.reason) for reply in users.replies if reply.arm != before[reply.user]}
    during = users.between(fell_s, back_s)
    off_s = max(reply.sent_s for reply in during if reply.arm == "candidate") - fell_s
    print(
        f"\nRedis silent for {back_s - fell_s:.1f} s: {len(during)} requests meanwhile to {GATEWAYS} gateways, "
        f"{len(users.failed)} failed, the candidate release was last shown after {off_s:.1f} s"
    )
    assert (users.failed, moved) == ([], {("stable", "fenced")})
