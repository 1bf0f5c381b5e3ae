"""One peer as the client sees it: its socket, the monitor of that socket, and the calls that wait for it.

Refuses a peer that says hello with another protocol, role or release than expected. Invariant: every future handed to
`send` is resolved: by its reply, or by PeerGone as soon as the connection is lost, or by whoever gave it up before.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

from infra.errors import ConfigurationError, PeerGone, TrirankError, WireProtocolError
from infra.wire import metrics
from infra.wire.curve import CurveKeys, require_keys, secure_client
from infra.wire.messages import PROTOCOL_VERSION, Reply, decode_reply, encode_request
from infra.wire.sockets import Socket, configure, readable, receive, send

_log = logging.getLogger(__name__)
_HELLO_ID = 0
_EVENT = struct.Struct("=H")
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# A peer that drops us at once again and again (wrong keys) is tried this often at most.
_REOPEN_S = 0.25
_RETIRE_CHECK_S = 0.05

Future = asyncio.Future[Reply]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to call: `release` "" accepts any; `public_key` (Z85) makes the connection encrypted."""

    name: str
    address: str
    release: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    public_key: str | None = None


class State(Enum):
    """What a connection is good for."""

    CONNECTING = "connecting"
    LIVE = "live"
    REFUSED = "refused"
    LEAVING = "leaving"
    CLOSED = "closed"


class Connection:
    """A DEALER to one address of one peer; all methods belong to the event loop's thread."""

    __slots__ = (
        "_changed", "_context", "_explained", "_fds", "_keys", "_loop", "_monitor", "_next_id", "_reopening",
        "_role", "_socket", "peer", "pending", "release", "state",
    )  # fmt: skip

    def __init__(
        self,
        peer: Peer,
        *,
        role: str,
        context: zmq.Context[Socket],
        keys: CurveKeys | None,
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.state = State.CONNECTING
        self.release = peer.release
        # Every call the peer has not answered; one that its caller has given up still is work for the peer.
        self.pending: dict[int, Future] = {}
        self._role = role
        self._context = context
        self._keys = keys
        self._changed = changed
        self._next_id = _HELLO_ID
        self._explained = False
        self._fds: tuple[int, int] | None = None
        self._reopening: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Connect and say hello; the state changes later, through `changed`."""
        self._loop = asyncio.get_running_loop()
        try:
            require_keys(self.peer.address, has_keys=self.peer.public_key is not None)
            self._connect()
        except ConfigurationError as error:
            self._refuse(str(error))

    def send(self, future: Future, frames_of: Callable[[int], list[Any]]) -> None:
        """Send a call; `frames_of` makes its frames for the id given. Raises WireProtocolError or PeerGone."""
        self._next_id += 1
        call_id = self._next_id
        frames = frames_of(call_id)
        try:
            send(self._socket, frames)
        except zmq.Again as error:
            raise PeerGone(f"{self.peer.name} does not read") from error
        self.pending[call_id] = future
        # The descriptor tells of a change once, and sending may have swallowed it.
        if readable(self._socket):
            self._read()

    def retire(self) -> None:
        """Let the calls in flight finish, then close."""
        self.state = State.LEAVING
        if self._fds is not None and any(not future.done() for future in self.pending.values()):
            self._loop.call_later(_RETIRE_CHECK_S, self.retire)
        else:
            self.close()

    def close(self) -> None:
        """Close now; calls in flight fail with PeerGone."""
        self._disconnect()
        self.state = State.CLOSED
        self._fail_pending()

    def _connect(self) -> None:
        self._reopening = None
        self._socket = socket = self._context.socket(zmq.DEALER)
        configure(socket, self.peer.address)
        self._monitor = socket.get_monitor_socket(_LOST)
        try:
            if self.peer.public_key is not None:
                self._secure(self.peer.public_key)
            socket.connect(self.peer.address)
        except (zmq.ZMQError, ConfigurationError) as error:
            self._close_sockets()
            raise ConfigurationError(f"{self.peer.address}: {error}") from error
        self._fds = int(socket.fd), int(self._monitor.fd)
        self._loop.add_reader(self._fds[0], self._read)
        self._loop.add_reader(self._fds[1], self._read_monitor)
        # Waits in the socket until it is connected, however often libzmq has to try.
        send(socket, encode_request(_HELLO_ID, "hello", args={"protocol": PROTOCOL_VERSION}))
        # libzmq signals a socket only after a read has found it empty.
        self._read()
        self._read_monitor()

    def _secure(self, server_key: str) -> None:
        if self._keys is None:
            raise ConfigurationError("the peer encrypts and there are no CURVE keys; give keys")
        secure_client(self._socket, self._keys, server_key)

    def _disconnect(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        if self._fds is None:
            return
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _read(self) -> None:
        """Take every message that is there; the descriptor is edge-triggered."""
        while self._fds is not None and readable(self._socket):
            self._take(receive(self._socket))

    def _take(self, frames: list[Any]) -> None:
        try:
            call_id, answer = decode_reply(frames)
        except WireProtocolError as error:
            metrics.MALFORMED.labels(self._role).inc()
            _log.warning("a reply was not understood", extra={"peer": self.peer.name, "reason": str(error)})
            # Nothing says which call it answered: start again, so that none of them waits in vain.
            self._lost()
            return
        if call_id == _HELLO_ID:
            self._greet(answer)
            return
        future = self.pending.pop(call_id, None)
        if future is None or future.done():
            metrics.LATE_REPLIES.labels(self._role).inc()
        elif isinstance(answer, TrirankError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _greet(self, answer: Reply | TrirankError) -> None:
        if isinstance(answer, TrirankError):
            self._refuse(str(answer))
            return
        says, wants = answer.args, self.peer.release
        if says.get("protocol") != PROTOCOL_VERSION:
            self._refuse(f"speaks protocol {says.get('protocol')}, not {PROTOCOL_VERSION}")
        elif says.get("role") != self._role:
            self._refuse(f"is {says.get('role')}, not {self._role}")
        elif wants and says.get("release") != wants:
            self._refuse(f"serves release {says.get('release')}, not {wants}")
        else:
            self.release = str(says.get("release", ""))
            self.state = State.LIVE
            _log.info("peer in use", extra={"peer": self.peer.name, "address": self.peer.address})
            self._changed()

    def _refuse(self, reason: str) -> None:
        metrics.PEERS_REFUSED.labels(self._role).inc()
        _log.warning("peer not used", extra={"peer": self.peer.name, "address": self.peer.address, "reason": reason})
        self.state = State.REFUSED
        self._changed()

    def _read_monitor(self) -> None:
        while self._fds is not None and readable(self._monitor):
            event = self._monitor.recv_multipart(zmq.NOBLOCK)
            kind = _EVENT.unpack_from(event[0])[0]
            if kind & _LOST:
                # Replies that came before the end count.
                self._read()
                self._explain(kind)
                self._lost()

    def _explain(self, kind: int) -> None:
        if kind & zmq.EVENT_DISCONNECTED or self._explained:
            return
        self._explained = True
        metrics.PEERS_REFUSED.labels(self._role).inc()
        reason = "the keys do not fit" if self.peer.public_key else "what listens there is not ours, or wants keys"
        _log.warning("peer not used", extra={"peer": self.peer.name, "address": self.peer.address, "reason": reason})

    def _lost(self) -> None:
        """Fail what is in flight and connect anew: a fresh socket brings no old requests to the next incarnation."""
        if self._fds is None:
            return
        if self.state is State.LEAVING:
            self.close()
            return
        was_live = self.state is State.LIVE
        self._disconnect()
        self.state = State.CONNECTING
        if was_live:
            metrics.PEER_DEATHS.labels(self._role).inc()
            _log.warning("peer gone", extra={"peer": self.peer.name, "in_flight": len(self.pending)})
            self._changed()
        self._fail_pending()
        self._reopening = self._loop.call_later(0 if was_live else _REOPEN_S, self._reopen)

    def _reopen(self) -> None:
        try:
            self._connect()
        except ConfigurationError as error:
            self._refuse(str(error))

    def _fail_pending(self) -> None:
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(PeerGone(f"{self.peer.name} died during the call"))
