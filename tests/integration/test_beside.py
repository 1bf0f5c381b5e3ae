"""What goes wrong with a release beside the first one is counted, and goes on to be looked after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from infra.embedded import EmbeddedRedis
from infra.redis import connect
from infra.settings import Settings
from reranker.gray.plan import Plan
from reranker.gray.state import GrayRelease
from tests.support import eventually, free_port

# Of Ray Serve, which is imported here although nothing runs on it.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def failures(what: str) -> float:
    return REGISTRY.get_sample_value("beside_failures_total", {"what": what}) or 0.0


@contextmanager
def following(url: str, stack: str) -> Iterator[None]:
    from reranker.beside import Beside

    beside = Beside(Settings(stack=stack), "a", url, "127.0.0.1:1")
    beside.start()
    try:
        yield
    finally:
        beside.stop()


def test_a_release_that_cannot_be_served_is_counted_once_and_the_reason_told(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    plan = Plan(name="g", stable="a", candidate="b", path=str(tmp_path / "nowhere"))
    before = failures("start")
    with connect(redis.url) as client:
        draft = GrayRelease(plan=plan, state="draft", base="a", changed_us=7)
        client.hset("start:gray", "release", msgspec.json.encode(draft))
        with following(redis.url, "start"):
            told: Any = eventually(lambda: client.hget("start:gray", "trouble"))
    assert "nowhere" in msgspec.json.decode(told)["why"]
    assert failures("start") == before + 1


@pytest.mark.parametrize("what", ["look", "redis"])
def test_what_is_in_the_way_is_counted_at_every_look(redis: EmbeddedRedis, what: str) -> None:
    url = redis.url
    if what == "look":
        with connect(url) as client:
            client.hset("look:gray", "release", b"no release")
    else:
        url = f"redis://127.0.0.1:{free_port()}/0"
    before = failures(what)
    with following(url, what):
        eventually(lambda: failures(what) >= before + 2, timeout_s=60)
