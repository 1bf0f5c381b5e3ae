from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.errors import ConfigurationError, PeerGone, ReleaseRefused
from reranker.gateway.server import GatewayServer
from tests.support import eventually, free_port


def app_that(work: Callable[[], str]) -> Callable[[], AbstractAsyncContextManager[ASGIApp]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[ASGIApp]:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            said = await asyncio.to_thread(work)
            await PlainTextResponse(said)(scope, receive, send)

        yield app

    return opened


def ask(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_two_gateways_share_one_port_and_one_goes_on_without_the_other() -> None:
    port = free_port()
    one, two = (GatewayServer("127.0.0.1", port, app_that(lambda said=said: said)) for said in ("one", "two"))  # type: ignore[misc]
    assert one.start() == port
    try:
        assert two.start() == port
        eventually(lambda: ask(port) == "two")
        eventually(lambda: ask(port) == "one")
        two.check()
        two.stop()
        assert {ask(port) for _ in range(20)} == {"one"}
        one.check()
    finally:
        two.stop()
        one.stop()


def test_stopping_finishes_what_was_accepted() -> None:
    release, inside = threading.Event(), threading.Event()

    def work() -> str:
        inside.set()
        release.wait(10)
        return "done"

    server = GatewayServer("127.0.0.1", 0, app_that(work))
    port = server.start()
    said: list[str] = []
    caller = threading.Thread(target=lambda: said.append(ask(port)))
    caller.start()
    assert inside.wait(10)
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    release.set()
    caller.join()
    stopper.join()

    assert said == ["done"]
    with pytest.raises(PeerGone):
        server.check()


def test_parts_that_cannot_be_opened_are_the_reason_it_does_not_start() -> None:
    @asynccontextmanager
    async def refused() -> AsyncIterator[ASGIApp]:
        raise ReleaseRefused("damaged")
        yield

    server = GatewayServer("127.0.0.1", 0, refused)

    with pytest.raises(ReleaseRefused, match="damaged"):
        server.start()
    server.stop()


def test_a_port_that_another_program_holds_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=str(port)):
            GatewayServer("127.0.0.1", port, app_that(str)).start()
