"""What one call over the wire costs, beside the same messages through zmq.asyncio (the peer), in the same run.

    python tests/bench/wire.py [--seconds 2] [--rounds 2] [--zero-copy]

A rank request (130 KB of tensors) goes to a second process that answers 500 floats. Columns: calls/s, p50, p99 and
processor time of the calling process for one call, for 1, 8 and 32 calls in flight. Compare rows of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from infra.deadline import Deadline
from infra.wire import Hello, Peer, Reply, Request, WireClient, WireServer, sockets
from infra.wire.messages import decode_reply, encode_request

CALLS_IN_FLIGHT = (1, 8, 32)
TENSORS = {
    "hist": np.random.default_rng(1).random((50, 64), dtype=np.float32),
    "target": np.random.default_rng(2).random((500, 64), dtype=np.float32),
    "mask": np.ones(50, dtype=np.float32),
    "user": np.ones(32, dtype=np.float32),
}
Call = Callable[[], Awaitable[object]]


class _Scores:
    """Answers every request with the same 500 scores: the wire's own cost."""

    def __init__(self) -> None:
        self._reply = Reply({}, {"scores": np.zeros(500, dtype=np.float32)})

    def handle(self, requests: Sequence[Request]) -> list[Reply]:
        return [self._reply] * len(requests)


def serve(address: str) -> None:
    """The second process."""
    server = WireServer(
        bind=address, hello=Hello("edge", "edge-0", "r1", 1, "s"), handler=_Scores(), max_batch=32, max_queue=256
    )
    server.start()
    sys.stdin.read()
    server.stop()


async def measure(label: str, call: Call, in_flight: int, seconds: float) -> None:
    """Keep `in_flight` calls going and print one row."""
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def worker() -> None:
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            await call()
            times_s.append(time.perf_counter() - start_s)

    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    p50, p99 = np.percentile(times_s, (50, 99)) * 1e6
    rate, cpu = len(times_s) / seconds, cpu_s / len(times_s) * 1e6
    print(f"{label:12} {in_flight:9} {rate:9.0f} {p50:8.0f} {p99:8.0f} {cpu:11.0f}", flush=True)


async def through_wire(address: str, in_flight: int, seconds: float) -> None:
    """Our client."""
    client = WireClient(role="edge")
    client.set_peers([Peer("edge-0", address, "r1")])
    await client.wait_live(deadline=Deadline.after(10))

    async def call() -> Reply:
        return await client.call("rank", tensors=TENSORS, release="r1", deadline=Deadline.after(10))

    await measure("wire", call, in_flight, seconds)
    await client.close()


async def through_zmq_asyncio(address: str, in_flight: int, seconds: float) -> None:
    """The peer: the same frames, sent and received with zmq.asyncio."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[object]] = {}

    async def take() -> None:
        while True:
            call_id, reply = decode_reply(await socket.recv_multipart(copy=False))
            waiting.pop(call_id).set_result(reply)

    async def call() -> object:
        call_id = call.next_id = call.next_id + 1  # type: ignore[attr-defined]
        future = waiting[call_id] = loop.create_future()
        await socket.send_multipart(encode_request(call_id, "rank", release="r1", remaining_s=10, tensors=TENSORS))
        async with asyncio.timeout(10):
            return await future

    call.next_id = 0  # type: ignore[attr-defined]
    taker = asyncio.create_task(take())
    await measure("zmq.asyncio", call, in_flight, seconds)
    taker.cancel()
    await asyncio.wait([taker])
    socket.close()
    context.term()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--zero-copy", action="store_true", help="send tensors of 16 KiB or more without a copy")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.zero_copy:
        sockets.ZERO_COPY_BYTES = 16 * 1024
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'edge'}"
        command = [sys.executable, os.path.abspath(__file__), "--serve", address]
        server = subprocess.Popen(command, stdin=subprocess.PIPE)
        print(f"{'':12} {'in flight':>9} {'calls/s':>9} {'p50 us':>8} {'p99 us':>8} {'cpu us/call':>11}")
        try:
            for _ in range(options.rounds):
                for in_flight in CALLS_IN_FLIGHT:
                    uvloop.run(through_wire(address, in_flight, options.seconds))
                    uvloop.run(through_zmq_asyncio(address, in_flight, options.seconds))
        finally:
            server.communicate()


if __name__ == "__main__":
    main()
