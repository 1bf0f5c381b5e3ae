"""One gateway's listening thread: an event loop of its own with uvicorn on a socket that other gateways share.

The loop, not the caller's thread, owns every part of the gateway: `run` starts them, serves, and closes them again.
Refuses a port it cannot bind. Invariant: while `alive` is true the loop has turned within the last seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import uvicorn
import uvloop
from starlette.types import ASGIApp

from infra.errors import ConfigurationError, PeerGone
from infra.garbage import settle

logger = logging.getLogger(__name__)

BEAT_S = 0.5
# A loop that has not turned for this long does not serve; Ray then starts another gateway.
STUCK_S = 10.0
DRAIN_S = 5


class GatewayServer:
    """Serves the application that `opened()` yields, until `stop`."""

    def __init__(self, host: str, port: int, opened: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> None:
        self._host = host
        self._port = port
        self._opened = opened
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._beat_s = 0.0

    def start(self, timeout_s: float = 60.0) -> int:
        """Bind, start the parts and listen; the port that is bound. Raises what kept it from starting."""
        listener = _bound(self._host, self._port)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="gateway", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise ConfigurationError(f"gateway: not started after {timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure
        return int(listener.getsockname()[1])

    def check(self) -> None:
        """Raises PeerGone when the loop is dead or stuck."""
        if self._thread is None or not self._thread.is_alive():
            raise PeerGone(f"gateway: the loop has ended: {self._failure!r}")
        if (silent_s := time.monotonic() - self._beat_s) > STUCK_S:
            raise PeerGone(f"gateway: the loop has not turned for {silent_s:.0f} s")

    def stop(self) -> None:
        """Accept nothing more, finish what was accepted, close the parts; returns when that is done."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(DRAIN_S + 10.0)
            self._thread = None

    def _run(self, listener: socket.socket) -> None:
        try:
            with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(listener))
        except BaseException as error:  # the thread's outermost frame: `check` and `start` hand it on
            self._failure = error
            logger.exception("the gateway's loop has ended")
        finally:
            self._ready.set()

    async def _serve(self, listener: socket.socket) -> None:
        beat = asyncio.create_task(self._keep_beating())
        try:
            async with self._opened() as app:
                self._server = _Announcing(_config(app), self._ready.set)
                await self._server.serve(sockets=[listener])
        finally:
            beat.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)


class _Announcing(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle()
        self._listening()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_S,
    )


def _bound(host: str, port: int) -> socket.socket:
    """A socket whose port other gateways can share (SO_REUSEPORT). It does not listen yet: the kernel would already
    hand it connections while the parts are still starting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"port: {host}:{port} cannot be used: {error.strerror}") from error
    listener.setblocking(False)
    return listener
