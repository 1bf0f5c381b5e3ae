"""The data plane under load: queues that refuse, deadlines, batches, what happens between them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import (
    DeadlineExceeded,
    Overloaded,
    Permanent,
    RemoteFailure,
    WireProtocolError,
)
from infra.wire import Peer, Reply
from tests.integration.wire_peers import Broken, Gate, calling, comes_true, serving, soon


def test_more_than_the_queue_holds_is_refused_at_once(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            held = asyncio.create_task(client.call("hold", deadline=soon()))
            await asyncio.to_thread(gate.held.wait, 20)
            calls = [asyncio.create_task(client.call("x", deadline=soon())) for _ in range(20)]
            await comes_true(lambda: client.peers()[0].in_flight == 21)
            gate.open.set()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, Overloaded)]
            # What waits while a batch runs is looked at together when it ends: the queue keeps four of it.
            assert len(refused) >= 1
            assert len(refused) + sum(isinstance(answer, Reply) for answer in answers) == 20
            assert server.stats()["refused"] == len(refused)
            await held

    gate = Gate()
    with serving(ipc, gate, max_batch=2, max_queue=4) as (server, address):
        run(main())


def test_a_client_refuses_to_have_more_in_flight_than_it_may(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address), max_in_flight_per_peer=3) as client:
            calls = [asyncio.create_task(client.call("hold", deadline=soon())) for _ in range(3)]
            await comes_true(lambda: client.peers()[0].in_flight == 3)
            with pytest.raises(Overloaded):
                await client.call("x", deadline=soon())
            gate.open.set()
            await asyncio.gather(*calls)
            await client.call("x", deadline=soon())

    gate = Gate()
    with serving(ipc, gate) as (_, address):
        run(main())


def test_the_less_busy_of_two_peers_gets_the_call(run: Callable[..., None], tmp_path: Path) -> None:
    async def main() -> None:
        async with calling(Peer("slow", slow), Peer("fast", fast)) as client:
            held = [asyncio.create_task(client.call("hold", peer="slow", deadline=soon())) for _ in range(2)]
            await comes_true(lambda: client.peers()[0].in_flight == 2)
            for _ in range(30):
                await client.call("x", deadline=soon())
            gate.open.set()
            await asyncio.gather(*held)
        assert sum(map(len, quick.batches)) == 30

    gate, quick = Gate(), Gate()
    with (
        serving(f"ipc://{tmp_path / 'slow'}", gate) as (_, slow),
        serving(f"ipc://{tmp_path / 'fast'}", quick) as (_, fast),
    ):
        run(main())


def test_a_call_ends_at_its_deadline_and_the_late_reply_is_dropped(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            with pytest.raises(DeadlineExceeded):
                await client.call("hold", deadline=soon(0.05))
            # It still is work for the peer, so it counts when the next peer is chosen.
            assert client.peers()[0].in_flight == 1
            gate.open.set()
            await comes_true(lambda: client.peers()[0].in_flight == 0)
            assert (await client.call("x", args={"k": 1}, deadline=soon())).args == {"k": 1}
            with pytest.raises(DeadlineExceeded):
                await client.call("x", deadline=soon(-1))

    gate = Gate()
    with serving(ipc, gate) as (_, address):
        run(main())


def test_a_request_whose_time_is_over_is_never_run(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            held = asyncio.create_task(client.call("hold", deadline=soon()))
            await asyncio.to_thread(gate.held.wait, 20)
            with pytest.raises(DeadlineExceeded):
                await client.call("expired", deadline=soon(0.05))
            gate.open.set()
            await held
            await comes_true(lambda: server.stats()["expired"] == 1)
            await client.call("x", deadline=soon())

    gate = Gate()
    with serving(ipc, gate) as (server, address):
        run(main())
    assert gate.batches == [["hold"], ["x"]]


def test_a_call_that_is_cancelled_leaves_nothing_behind(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            call = asyncio.create_task(client.call("hold", deadline=soon()))
            await asyncio.to_thread(gate.held.wait, 20)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            gate.open.set()
            await comes_true(lambda: client.peers()[0].in_flight == 0)

    gate = Gate()
    with serving(ipc, gate) as (_, address):
        run(main())


def test_what_waits_runs_as_one_batch_of_at_most_the_largest_size(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            held = asyncio.create_task(client.call("hold", deadline=soon()))
            await asyncio.to_thread(gate.held.wait, 20)
            calls = [asyncio.create_task(client.call("x", deadline=soon())) for _ in range(20)]
            await comes_true(lambda: client.peers()[0].in_flight == 21)
            gate.open.set()
            await asyncio.gather(held, *calls)

    gate = Gate()
    with serving(ipc, gate, max_batch=8) as (_, address):
        run(main())
    sizes = [len(batch) for batch in gate.batches]
    assert sum(sizes) == 21
    assert max(sizes) == 8


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [(ValueError("secret"), RemoteFailure), (Permanent("no such generation"), Permanent), (None, RemoteFailure)],
)
def test_a_handler_that_fails_fails_its_batch_and_the_loop_lives_on(
    ipc: str, error: Exception | None, arrives_as: type[Exception]
) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            with pytest.raises(arrives_as) as caught:
                await client.call("x", deadline=soon())
            assert "secret" not in str(caught.value)
            if error is not None:
                await client.call("fine", deadline=soon())

    with serving(ipc, Broken(error)) as (server, address):
        asyncio.run(main())
        assert server.alive


def test_one_answer_may_be_an_error_and_one_that_cannot_travel_becomes_one(ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            with pytest.raises(Permanent, match="not that one"):
                await client.call("refuse", deadline=soon())
            with pytest.raises(RemoteFailure, match="cannot travel"):
                await client.call("text", deadline=soon())
            with pytest.raises(WireProtocolError):
                await client.call("x", args={"a": object()}, deadline=soon())
            assert client.peers()[0].in_flight == 0

    with serving(ipc, Gate()) as (_, address):
        asyncio.run(main())


def test_ping_tells_the_load(ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            await client.call("x", deadline=soon())
            reply = await client.call("ping", deadline=soon())
            assert reply.args == {"queue": 0, "in_flight": 0, "handled": 1, "refused": 0, "expired": 0}

    with serving(ipc, Gate()) as (_, address):
        asyncio.run(main())


def test_a_request_can_be_followed_through_the_log_of_whoever_answered_it(
    ipc: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with calling(Peer("edge-0", address)) as client:
            await client.call("echo", deadline=soon(), trace_id="a")
            caplog.set_level(logging.DEBUG, "infra.wire.server")
            await client.call("echo", deadline=soon(), trace_id="b")

    with serving(ipc, Gate()) as (_, address):
        asyncio.run(go())
    told = [vars(record) for record in caplog.records if record.message == "answered"]
    assert [(one["role"], one["release"], one["trace"]) for one in told] == [("edge", "r1", "b")]


def test_wake_runs_what_is_between_batches_and_its_failure_ends_nothing(ipc: str) -> None:
    ran = threading.Event()
    fail = threading.Event()

    def between() -> None:
        ran.set()
        if fail.is_set():
            raise ValueError("between")

    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            await client.call("x", deadline=soon())

    with serving(ipc, Gate(), between_batches=between) as (server, address):
        for _ in range(3):
            ran.clear()
            server.wake()
            assert ran.wait(20)
            fail.set()
        asyncio.run(main())
        assert server.alive
    server.wake()
