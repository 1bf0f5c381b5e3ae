"""The data plane and others: wrong releases, strangers, noise, keys, addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PeerGone,
)
from infra.wire import CurveKeys, Hello, Peer, WireClient, WireServer
from infra.wire.messages import encode_request
from tests.integration.wire_peers import HELLO, ROWS, Gate, calling, comes_true, serving, soon
from tests.support import eventually, free_port


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
