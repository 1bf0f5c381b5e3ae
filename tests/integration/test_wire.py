"""The data plane over real sockets: calls, and the death of a peer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra.errors import (
    PeerGone,
)
from infra.wire import Peer, Reply, WireClient
from tests.integration.wire_peers import ROWS, Gate, calling, comes_true, process, said, serving, soon


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
