"""The data plane over real sockets: death of a peer, overload, deadlines, strangers, encryption."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import uvloop
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.deadline import Deadline
from infra.errors import (
    ConfigurationError,
    DeadlineExceeded,
    Overloaded,
    PeerGone,
    Permanent,
    RemoteFailure,
    TrirankError,
    WireProtocolError,
)
from infra.wire import CurveKeys, Hello, Peer, Reply, Request, WireClient, WireServer
from infra.wire.messages import encode_request
from tests.support import eventually, free_port

T = TypeVar("T")
ROWS = np.random.default_rng(0).random((500, 64), dtype=np.float32)
HELLO = Hello("edge", "edge-0", "r1", 1, "schema")


class Gate:
    """A handler that echoes; "hold" requests wait until the gate is opened."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.held = threading.Event()
        self.open = threading.Event()

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        self.batches.append([request.method for request in requests])
        if requests[0].method == "hold":
            self.held.set()
            self.open.wait(30)
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Reply | TrirankError:
        if request.method == "refuse":
            return Permanent("not that one")
        if request.method == "text":
            return Reply({}, {"a": np.array(["text"])})
        return Reply(request.args, request.tensors)


class Broken:
    """A handler that raises what it is given."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        if requests[0].method == "fine" or self._error is None:
            return [Reply()] * (len(requests) if self._error else 0)
        raise self._error


@contextmanager
def serving(bind: str, handler: Any, **options: Any) -> Iterator[tuple[WireServer, str]]:
    settings = {"hello": HELLO, "max_batch": 8, "max_queue": 64, **options}
    server = WireServer(bind=bind, handler=handler, **settings)
    address = server.start()
    try:
        yield server, address
    finally:
        if isinstance(handler, Gate):
            handler.open.set()
        server.stop()


@contextmanager
def process(address: str, name: str = "edge-0", release: str = "r1") -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("wire_process.py")
    child = subprocess.Popen(
        [sys.executable, str(script), address, name, release],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@asynccontextmanager
async def calling(*peers: Peer, live: int | None = None, **options: Any) -> AsyncIterator[WireClient]:
    client = WireClient(role="edge", **options)
    client.set_peers(peers)
    try:
        await client.wait_live(len(peers) if live is None else live, deadline=soon())
        yield client
    finally:
        await client.close()


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


async def comes_true(probe: Callable[[], object]) -> None:
    """Wait for a condition in the loop's own thread."""
    async with asyncio.timeout(20):
        while not probe():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    return {"asyncio": asyncio.run, "uvloop": uvloop.run}[request.param]


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 's'}"


def test_a_call_brings_back_what_the_handler_answered(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address, "r1", {"shard": 3})) as client:
            for rows in (ROWS, ROWS[:0], np.zeros((3000, 64), dtype=np.float64), np.int64(7).reshape(())):
                reply = await client.call("x", args={"k": 5}, tensors={"rows": rows}, deadline=soon())
                assert reply.args == {"k": 5}
                np.testing.assert_array_equal(reply.tensors["rows"], rows)
            (state,) = client.peers()
            assert (state.name, state.release, state.live, state.in_flight) == ("edge-0", "r1", True, 0)
            assert state.meta == {"shard": 3}

    with serving(ipc, Gate()) as (server, address):
        run(main())
        assert server.stats() == {"queue": 0, "in_flight": 0, "handled": 4, "refused": 0, "expired": 0}
    assert not server.alive


def test_it_works_over_loopback_tcp_on_a_port_chosen_by_the_system(run: Callable[..., None]) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            reply = await client.call("x", tensors={"rows": ROWS}, deadline=soon())
            np.testing.assert_array_equal(reply.tensors["rows"], ROWS)

    with serving("tcp://127.0.0.1:*", Gate()) as (_, address):
        assert address.startswith("tcp://127.0.0.1:")
        run(main())


def test_many_calls_in_flight_each_get_their_own_answer(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:

            async def one(number: int) -> None:
                tensors = {"n": np.full((300, 64), number, dtype=np.int64)}
                reply = await client.call("x", args={"n": number}, tensors=tensors, deadline=soon(60))
                assert reply.args == {"n": number}
                assert (reply.tensors["n"] == number).all()

            for start in range(0, 2000, 200):
                await asyncio.gather(*(one(number) for number in range(start, start + 200)))

    with serving(ipc, Gate(), max_queue=256) as (_, address):
        run(main())


def test_a_call_in_flight_to_a_killed_peer_fails_at_once(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", ipc, "r1")) as client:
            call = asyncio.create_task(client.call("stick", deadline=soon(60)))
            assert await asyncio.to_thread(said, child) == "stick"
            child.send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
            with pytest.raises(PeerGone, match="died during the call"):
                await call
            # A few ms on an idle machine; far from the deadline on any.
            assert time.monotonic() - killed_s < 30.0
            with pytest.raises(PeerGone, match="no live peer"):
                await client.call("echo", deadline=soon())

    with process(ipc) as child:
        run(main())


def test_the_other_peers_are_used_at_once_and_the_dead_one_when_it_is_back(
    run: Callable[..., None], tmp_path: Path
) -> None:
    one, two = f"ipc://{tmp_path / '1'}", f"ipc://{tmp_path / '2'}"

    async def names(client: WireClient, count: int) -> set[str]:
        return {(await client.call("echo", deadline=soon())).args["name"] for _ in range(count)}

    async def main() -> None:
        async with calling(Peer("one", one, "r1"), Peer("two", two, "r1")) as client:
            assert await names(client, 40) == {"one", "two"}
            call = asyncio.create_task(client.call("stick", peer="one", deadline=soon(60)))
            await asyncio.to_thread(lambda: list(iter(lambda: said(first), "stick")))
            first.kill()
            with pytest.raises(PeerGone):
                await call
            assert await names(client, 40) == {"two"}
            with process(one, "one"):
                await client.wait_live(2, deadline=soon())
                assert await names(client, 40) == {"one", "two"}

    with process(one, "one") as first, process(two, "two"):
        run(main())


def test_a_peer_that_comes_back_elsewhere_is_used_there(run: Callable[..., None], tmp_path: Path) -> None:
    old, new = f"ipc://{tmp_path / 'old'}", f"ipc://{tmp_path / 'new'}"

    async def main() -> None:
        async with calling(Peer("shard-0", old)) as client:
            child.kill()
            await comes_true(lambda: not client.peers()[0].live)
            with process(new, "shard-0"):
                client.set_peers([Peer("shard-0", new)])
                await client.wait_live(deadline=soon())
                assert (await client.call("echo", deadline=soon())).args == {"name": "shard-0"}

    with process(old, "shard-0") as child:
        run(main())


def test_a_stopped_process_is_noticed_by_heartbeat(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", ipc)) as client:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(PeerGone):
                await client.call("echo", deadline=soon(60))
            child.send_signal(signal.SIGCONT)
            await client.wait_live(deadline=soon())

    with process(ipc) as child:
        run(main())


def test_a_peer_taken_off_the_list_finishes_its_calls(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            call = asyncio.create_task(client.call("hold", args={"k": 1}, deadline=soon()))
            await asyncio.to_thread(gate.held.wait, 20)
            client.set_peers([])
            assert client.peers() == []
            with pytest.raises(PeerGone):
                await client.call("x", deadline=soon())
            gate.open.set()
            assert (await call).args == {"k": 1}

    gate = Gate()
    with serving(ipc, gate) as (_, address):
        run(main())


def test_a_server_that_stops_delivers_every_answer_it_made(run: Callable[..., None], ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", address)) as client:
            calls = [asyncio.create_task(client.call("hold", deadline=soon()))]
            await asyncio.to_thread(gate.held.wait, 20)
            calls += [asyncio.create_task(client.call("x", deadline=soon(60))) for _ in range(20)]
            await comes_true(lambda: client.peers()[0].in_flight == 21)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            gate.open.set()
            await stopping
            answers = await asyncio.gather(*calls, return_exceptions=True)
            # A call that had not reached the server yet sees the peer gone; none waits for its deadline.
            assert sum(isinstance(answer, Reply) for answer in answers) == server.stats()["handled"] >= 1
            assert all(isinstance(answer, Reply | PeerGone) for answer in answers)

    gate = Gate()
    with serving(ipc, gate, max_batch=1) as (server, address):
        run(main())


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


@pytest.mark.parametrize(
    ("peer", "role", "reason"),
    [
        (Peer("edge-0", "", "r2"), "edge", "serves release r1, not r2"),
        (Peer("edge-0", ""), "rerank", "is edge, not rerank"),
    ],
)
def test_hello_refuses_a_peer_of_another_release_or_role(
    ipc: str, caplog: pytest.LogCaptureFixture, peer: Peer, role: str, reason: str
) -> None:
    async def main() -> None:
        client = WireClient(role=role)
        client.set_peers([Peer(peer.name, address, peer.release)])
        await comes_true(lambda: reason in reasons(caplog))
        assert [state.live for state in client.peers()] == [False]
        with pytest.raises(PeerGone):
            await client.call("x", deadline=soon())
        with pytest.raises(PeerGone):
            await client.call("x", peer="edge-0", deadline=soon())
        await client.close()

    with serving(ipc, Gate()) as (_, address), caplog.at_level(logging.WARNING):
        asyncio.run(main())


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(getattr(record, "reason", "")) for record in caplog.records]


def test_hello_refuses_a_peer_of_another_protocol(ipc: str, caplog: pytest.LogCaptureFixture) -> None:
    def other_protocol(router: zmq.Socket[bytes]) -> None:
        client, *_ = router.recv_multipart()
        reply = [1, 0, "", "", {"protocol": 2, "role": "edge", "release": "r1"}, []]
        router.send_multipart([client, msgspec.msgpack.encode(reply)])

    async def main() -> None:
        client = WireClient(role="edge")
        client.set_peers([Peer("edge-0", ipc)])
        await comes_true(lambda: "speaks protocol 2, not 1" in reasons(caplog))
        assert not client.peers()[0].live
        await client.close()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(ipc)
        thread = threading.Thread(target=other_protocol, args=(router,))
        thread.start()
        asyncio.run(main())
        thread.join()


def test_a_call_for_a_release_goes_only_to_peers_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with calling(Peer("a", one, "r1"), Peer("b", two)) as client:
            for _ in range(10):
                await client.call("x", release="r2", deadline=soon())
            with pytest.raises(PeerGone, match="release r3"):
                await client.call("x", release="r3", deadline=soon())
            with pytest.raises(PeerGone, match="serves release r1"):
                await client.call("x", release="r2", peer="a", deadline=soon())
        assert (sum(map(len, first.batches)), sum(map(len, second.batches))) == (0, 10)

    first, second = Gate(), Gate()
    hello = Hello("edge", "edge-1", "r2", 2, "schema")
    with (
        serving(f"ipc://{tmp_path / '1'}", first) as (_, one),
        serving(f"ipc://{tmp_path / '2'}", second, hello=hello) as (_, two),
    ):
        asyncio.run(main())


@pytest.fixture(scope="module")
def victim() -> Iterator[tuple[WireServer, str]]:
    with serving(f"tcp://127.0.0.1:{free_port()}", Gate()) as served:
        yield served


@given(st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=4), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_of_a_stranger_never_end_the_server(
    victim: tuple[WireServer, str], messages: list[list[bytes]]
) -> None:
    server, address = victim
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(address)
        for message in messages:
            stranger.send_multipart(message)
        stranger.send_multipart(encode_request(77, "ping"))
        assert stranger.poll(20_000)
        assert msgspec.msgpack.decode(stranger.recv_multipart()[0])[:3] == [1, 77, ""]
    assert server.alive


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_not_zeromq_never_end_the_server(victim: tuple[WireServer, str], noise: bytes) -> None:
    server, address = victim
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
    assert server.alive


def test_a_reply_that_is_not_ours_fails_the_calls_in_flight_at_once(ipc: str) -> None:
    def stranger(router: zmq.Socket[bytes]) -> None:
        client, *_ = router.recv_multipart()
        hello = [1, 0, "", "", {"protocol": 1, "role": "edge", "release": "r1"}, []]
        router.send_multipart([client, msgspec.msgpack.encode(hello)])
        router.recv_multipart()
        router.send_multipart([client, b"\xc1 not ours"])

    async def main() -> None:
        async with calling(Peer("edge-0", ipc)) as client:
            with pytest.raises(PeerGone):
                await client.call("x", deadline=soon(60))

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(ipc)
        thread = threading.Thread(target=stranger, args=(router,))
        thread.start()
        asyncio.run(main())
        thread.join()


def test_with_keys_only_those_who_hold_them_are_answered(run: Callable[..., None]) -> None:
    ours, stranger = CurveKeys.generate(), CurveKeys.generate()

    async def main() -> None:
        async with calling(Peer("edge-0", address, public_key=ours.public_key), curve=ours) as client:
            reply = await client.call("x", tensors={"rows": ROWS}, deadline=soon())
            np.testing.assert_array_equal(reply.tensors["rows"], ROWS)
            for keys, public_key in ((stranger, ours.public_key), (ours, stranger.public_key), (None, None)):
                other = WireClient(role="edge", curve=keys)
                other.set_peers([Peer("edge-0", address, public_key=public_key)])
                with pytest.raises(DeadlineExceeded):
                    await other.wait_live(deadline=soon(0.4))
                await other.close()

    with serving("tcp://127.0.0.1:*", Gate(), curve=ours) as (server, address):
        run(main())
        assert server.stats()["handled"] == 1
    assert ours.secret_key not in repr(ours)


def test_an_address_others_can_reach_is_refused_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    for bind in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:9", "nonsense", "tcp://127.0.0.1.example.com:1"):
        with pytest.raises(ConfigurationError, match="CURVE"):
            WireServer(bind=bind, hello=HELLO, handler=Gate(), max_batch=1, max_queue=1).start()

    async def main() -> None:
        client = WireClient(role="edge")
        client.set_peers([Peer("edge-0", "tcp://192.0.2.1:9"), Peer("edge-1", "ipc:///tmp/x", public_key="short")])
        assert [state.live for state in client.peers()] == [False, False]
        await client.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert any("CURVE keys" in reason for reason in reasons(caplog))


def test_an_address_that_cannot_be_bound_says_so(tmp_path: Path) -> None:
    with serving("tcp://127.0.0.1:*", Gate()) as (_, address):
        for bind in (address, f"ipc://{tmp_path}/{'x' * 120}", f"ipc://{tmp_path}/no/such/folder"):
            with pytest.raises(ConfigurationError, match="cannot be bound"):
                WireServer(bind=bind, hello=HELLO, handler=Gate(), max_batch=1, max_queue=1).start()


def test_a_server_can_be_stopped_and_started_again(ipc: str) -> None:
    async def main() -> None:
        async with calling(Peer("edge-0", ipc)) as client:
            await client.call("x", deadline=soon())
            await asyncio.to_thread(server.stop)
            await comes_true(lambda: not client.peers()[0].live)
            with serving(ipc, Gate()):
                await client.wait_live(deadline=soon())
                await client.call("x", deadline=soon())

    with serving(ipc, Gate()) as (server, _):
        asyncio.run(main())
        assert eventually(lambda: not server.alive)
        server.stop()
