"""The serving side of the wire: one thread, one ROUTER socket, batches that form by themselves.

The loop takes everything that is waiting, runs it as one batch, replies, and looks again; it never waits to fill a
batch. Refuses at once (Overloaded) what does not fit the queue, and never runs a request whose time is over. Invariant:
nothing that arrives and nothing a handler raises ends the loop; a request that can be read is answered exactly once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import zmq

from infra.errors import (
    ConfigurationError,
    DeadlineExceeded,
    Overloaded,
    RemoteFailure,
    TrirankError,
    WireProtocolError,
)
from infra.wire import metrics
from infra.wire.curve import CurveKeys, require_keys, secure_server
from infra.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Reply,
    Request,
    call_id_of,
    decode_request,
    encode_reply,
)
from infra.wire.sockets import MORE, NO_WAIT, configure, readable, receive, send

_log = logging.getLogger(__name__)
_LINGER_MS = 500
_JOIN_S = 10.0
# A flood is looked at in slices, so that admitted requests run in between.
_SLICE = 1024


class BatchHandler(Protocol):
    """What a tier does with its requests."""

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        """One answer per request, in order. A TrirankError raised fails the whole batch."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    client: bytes
    call_id: int
    request: Request
    expires_s: float


class WireServer:
    """Answers calls at one address.

    bind: "ipc:///path" (at most 107 characters) or "tcp://127.0.0.1:*"; other hosts need `curve`.
    max_batch is how many requests the handler gets at once, at most; a function is asked before every batch.
    between_batches runs in the loop's thread after every batch and soon after wake().
    """

    def __init__(
        self,
        *,
        bind: str,
        hello: Hello,
        handler: BatchHandler,
        max_batch: int | Callable[[], int],
        max_queue: int,
        between_batches: Callable[[], None] | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        self._bind = bind
        self._hello = hello
        self._handler = handler
        self._max_batch = max_batch if callable(max_batch) else lambda: max_batch
        self._max_queue = max_queue
        self._between_batches = between_batches
        self._curve = curve
        self._queue: deque[_Waiting] = deque()
        self._in_flight = 0
        self._handled = 0
        self._refused = 0
        self._expired = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Bind and serve; returns the address really bound. Raises ConfigurationError when it cannot be bound."""
        require_keys(self._bind, has_keys=self._curve is not None)
        role = self._hello.role
        self._ok, self._failed, self._late = (
            metrics.SERVED.labels(role, outcome) for outcome in ("ok", "failed", "expired")
        )
        self._batch_size = metrics.BATCH_SIZE.labels(role)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router, self._bind)
        self._authenticator = secure_server(self._context, self._router, self._curve) if self._curve else None
        try:
            self._router.bind(self._bind)
        except zmq.ZMQError as error:
            self._release()
            raise ConfigurationError(f"{self._bind}: cannot be bound: {error}") from error
        address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._thread = threading.Thread(target=self._loop, name=f"wire-{self._hello.name}", daemon=True)
        self._thread.start()
        return address

    def stop(self) -> None:
        """Answer what has arrived, then close. Callers of anything later see the peer gone at once."""
        if self._thread is None:
            return
        self._stopping = True
        self.wake()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("the handler does not return; its socket stays open", extra={"peer": self._hello.name})
            return
        self._thread = None
        self._release()

    def wake(self) -> None:
        """Make the loop run between_batches soon; from any thread, and harmless after stop()."""
        try:
            self._wake_out.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: it has been woken already. Closed: there is no loop.
            return

    def stats(self) -> dict[str, int]:
        """Counts since start, and what is waiting now."""
        return {
            "queue": len(self._queue),
            "in_flight": self._in_flight,
            "handled": self._handled,
            "refused": self._refused,
            "expired": self._expired,
        }

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread is not None and self._thread.is_alive()

    def _release(self) -> None:
        self._router.close(linger=_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._wake_out.close()
        self._wake_in.close()

    def _loop(self) -> None:
        while not self._stopping:
            self._guarded(self._turn)
        self._guarded(self._finish)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # noqa: BLE001 - the outermost loop
            _log.exception("the server loop goes on", extra={"peer": self._hello.name})
            metrics.LOOP_FAILURES.labels(self._hello.role).inc()

    def _turn(self) -> None:
        if not self._queue:
            self._wait()
        self._receive_waiting()
        self._run_batch()
        if self._between_batches is not None:
            self._between_batches()

    def _finish(self) -> None:
        self._receive_waiting()
        while self._queue:
            self._run_batch()
            self._receive_waiting()

    def _wait(self) -> None:
        for source, _ in self._poller.poll():
            if source != self._router:
                self._clear_wake()

    def _clear_wake(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            return

    def _receive_waiting(self) -> None:
        for _ in range(_SLICE):
            if not readable(self._router):
                return
            client = self._router.recv(NO_WAIT)
            self._admit(client, receive(self._router))

    def _admit(self, client: bytes, frames: list[Any]) -> None:
        try:
            call_id, request = decode_request(frames)
        except WireProtocolError as error:
            self._refuse_malformed(client, frames, error)
            return
        if request.method == "hello":
            self._reply(client, call_id, Reply({"protocol": PROTOCOL_VERSION, **asdict(self._hello)}))
        elif request.method == "ping":
            self._reply(client, call_id, Reply(dict(self.stats())))
        elif request.release and self._hello.release and request.release != self._hello.release:
            self._reply(client, call_id, WireProtocolError(f"serves release {self._hello.release}"))
        elif len(self._queue) >= self._max_queue:
            self._refused += 1
            metrics.REFUSED.labels(self._hello.role).inc()
            self._reply(client, call_id, Overloaded(f"{self._hello.name}: {self._max_queue} requests wait"))
        else:
            left = request.remaining_s
            expires_s = float("inf") if left is None else time.monotonic() + left
            self._queue.append(_Waiting(client, call_id, request, expires_s))

    def _refuse_malformed(self, client: bytes, frames: list[Any], error: WireProtocolError) -> None:
        metrics.MALFORMED.labels(self._hello.role).inc()
        _log.warning("a message was not understood", extra={"peer": self._hello.name, "reason": str(error)})
        call_id = call_id_of(frames)
        if call_id is not None:
            self._reply(client, call_id, error)

    def _take(self) -> list[_Waiting]:
        """The next batch; requests whose time is over are answered on the way and not run."""
        batch: list[_Waiting] = []
        now_s, most = time.monotonic(), self._max_batch()
        while self._queue and len(batch) < most:
            waiting = self._queue.popleft()
            if waiting.expires_s > now_s:
                batch.append(waiting)
                continue
            self._expired += 1
            self._late.inc()
            self._reply(waiting.client, waiting.call_id, DeadlineExceeded(f"{self._hello.name}: queue"))
        return batch

    def _run_batch(self) -> None:
        batch = self._take()
        if not batch:
            return
        self._in_flight = len(batch)
        self._batch_size.observe(len(batch))
        answers = self._answers([waiting.request for waiting in batch])
        failed, traced = 0, _log.isEnabledFor(logging.DEBUG)
        for waiting, answer in zip(batch, answers, strict=True):
            failed += isinstance(answer, TrirankError)
            if traced:
                named = {"role": self._hello.role, "release": self._hello.release}
                _log.debug("answered", extra={**named, "trace": waiting.request.trace_id})
            self._reply(waiting.client, waiting.call_id, answer)
        self._in_flight = 0
        self._handled += len(batch)
        self._ok.inc(len(batch) - failed)
        self._failed.inc(failed)

    def _answers(self, requests: list[Request]) -> Sequence[Reply | TrirankError]:
        try:
            answers = self._handler.handle(requests)
            if len(answers) == len(requests):
                return answers
            _log.error("the handler gave another number of answers", extra={"peer": self._hello.name})
        except TrirankError as error:
            return [error] * len(requests)
        except Exception:  # noqa: BLE001 - the outermost loop of the handler
            _log.exception("the handler failed", extra={"peer": self._hello.name})
        return [RemoteFailure(f"{self._hello.name} failed; its log has the details")] * len(requests)

    def _reply(self, client: bytes, call_id: int, answer: Reply | TrirankError) -> None:
        try:
            frames = encode_reply(call_id, answer)
        except WireProtocolError as error:
            _log.error("an answer cannot travel", extra={"peer": self._hello.name, "reason": str(error)})
            frames = encode_reply(call_id, RemoteFailure(f"{self._hello.name}: {error}"))
        try:
            self._router.send(client, MORE | NO_WAIT)
            send(self._router, frames)
        except zmq.Again:
            metrics.LOOP_FAILURES.labels(self._hello.role).inc()
