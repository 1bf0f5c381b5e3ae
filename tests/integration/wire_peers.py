"""Servers and clients of the data plane for tests, in this process or in one that can be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from infra.deadline import Deadline
from infra.errors import (
    Permanent,
    TrirankError,
)
from infra.wire import Hello, Peer, Reply, Request, WireClient, WireServer

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
