"""Lanes are lent to one request at a time and always come back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.engine.pool import Pool, Usage
from infra.errors import Overloaded, Permanent
from tests.support import eventually


def test_a_lane_is_used_by_one_request_at_a_time_and_every_request_gets_one() -> None:
    pool = Pool(["a", "b", "c"])
    using: set[str] = set()
    both = threading.Lock()

    def request(_: int) -> None:
        with pool.lane(30.0) as lane:
            with both:
                assert lane not in using
                using.add(lane)
            with both:
                using.remove(lane)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(request, range(400)))
    usage = pool.usage()
    assert (usage.in_flight, usage.taken, usage.refused) == (0, 400, 0)
    assert 1 <= usage.peak <= 3


def test_a_lane_comes_back_after_an_error() -> None:
    pool = Pool(["only"])
    with pytest.raises(ZeroDivisionError), pool.lane(0.0):
        raise ZeroDivisionError
    with pool.lane(0.0) as lane:
        assert lane == "only"


def test_a_request_that_finds_no_lane_in_time_is_refused_and_counted() -> None:
    pool = Pool(["only"])
    with pool.lane(0.0):
        with pytest.raises(Overloaded, match="all 1 lanes"), pool.lane(0.01):
            pass
        assert pool.usage() == Usage(lanes=1, in_flight=1, peak=1, taken=1, refused=1)
    with pool.lane(0.0):
        pass


def test_a_waiting_request_gets_the_lane_that_comes_back() -> None:
    pool = Pool(["only"])
    got: list[str] = []

    def wait() -> None:
        with pool.lane(30.0) as lane:
            got.append(lane)

    with pool.lane(0.0):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert got == []
    waiting.join(30.0)
    assert got == ["only"]


def test_close_waits_for_requests_and_then_refuses_new_ones() -> None:
    pool = Pool(["a", "b"])
    entered, leave = threading.Event(), threading.Event()

    def request() -> None:
        with pool.lane(1.0):
            entered.set()
            leave.wait(30.0)

    running = threading.Thread(target=request)
    running.start()
    entered.wait(30.0)
    with pytest.raises(Overloaded, match="1 requests are still on the GPU"):
        pool.close(0.01)
    leave.set()
    assert sorted(pool.close(30.0)) == ["a", "b"]
    with pytest.raises(Permanent, match="closed"), pool.lane(1.0):
        pass
    running.join(30.0)


def test_close_wakes_those_who_wait_for_a_lane() -> None:
    pool = Pool(["only"])
    refused = threading.Event()

    def wait() -> None:
        with pytest.raises(Permanent, match="closed"), pool.lane(30.0):
            pass
        refused.set()

    with pool.lane(0.0):
        waiting = threading.Thread(target=wait)
        waiting.start()
        with pytest.raises(Overloaded):
            pool.close(0.05)
        eventually(refused.is_set, timeout_s=30.0)
    waiting.join(30.0)
