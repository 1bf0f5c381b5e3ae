"""The calling side of the wire, for asyncio: calls to whichever live peer has less to do.

Refuses at once when no peer is live (PeerGone) or the chosen one has too much in flight (Overloaded); never retries.
Invariant: a call ends at its deadline, at its reply, or when the connection to its peer is lost, whichever is first.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from infra.deadline import Deadline
from infra.errors import DeadlineExceeded, Overloaded, PeerGone, TrirankError
from infra.wire import metrics
from infra.wire.connection import Connection, Future, Peer, State
from infra.wire.curve import CurveKeys
from infra.wire.messages import Reply, encode_request
from infra.wire.tensors import Array

_FAILED: dict[type[TrirankError], str] = {DeadlineExceeded: "deadline", PeerGone: "gone", Overloaded: "overloaded"}


@dataclass(frozen=True, slots=True)
class PeerState:
    """A peer now; `in_flight` counts the calls it has not answered, given up or not."""

    name: str
    address: str
    release: str
    live: bool
    in_flight: int
    meta: dict[str, Any]


class WireClient:
    """Calls peers of one role. Every method belongs to the thread of one event loop.

    max_in_flight_per_peer: at most 4,096.
    """

    def __init__(self, *, role: str, max_in_flight_per_peer: int = 256, curve: CurveKeys | None = None) -> None:
        self._role = role
        self._max_in_flight = max_in_flight_per_peer
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connections: dict[str, Connection] = {}
        self._retired: set[Connection] = set()
        self._live: dict[str, list[Connection]] = {}
        self._change = asyncio.Event()
        self._seconds = metrics.CALL_SECONDS.labels(role)
        self._outcomes = {
            outcome: metrics.CALLS.labels(role, outcome) for outcome in ("ok", "failed", "cancelled", *_FAILED.values())
        }

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Use exactly these peers; one that moved or has a new release is met anew.

        A peer that left, or the old place of one that moved, still answers the calls it has.
        """
        wanted = {peer.name: peer for peer in peers}
        for name, connection in list(self._connections.items()):
            old, new = connection.peer, wanted.get(name)
            if new is not None and _same_place(old, new):
                connection.peer = new
                continue
            self._retire(self._connections.pop(name))
        for name, peer in wanted.items():
            if name not in self._connections:
                self._meet(peer)
        self._recount()

    def peers(self) -> list[PeerState]:
        """Every peer that was set, live or not."""
        return [
            PeerState(c.peer.name, c.peer.address, c.release, c.state is State.LIVE, len(c.pending), c.peer.meta)
            for c in self._connections.values()
        ]

    async def wait_live(self, count: int = 1, *, release: str = "", deadline: Deadline) -> None:
        """Return when `count` peers of the release ("" is any) are live. Raises DeadlineExceeded."""
        while len(self._live.get(release, ())) < count:
            self._change.clear()
            try:
                await asyncio.wait_for(self._change.wait(), max(0.0, deadline.remaining_s()))
            except TimeoutError as error:
                raise DeadlineExceeded(f"fewer than {count} live peers of role {self._role}") from error

    async def call(
        self,
        method: str,
        *,
        args: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Array] | None = None,
        release: str = "",
        deadline: Deadline,
        trace_id: str = "",
        peer: str | None = None,
    ) -> Reply:
        """Call one live peer of the release ("" is any), or the one named.

        Tensors of 512 KiB or more are not copied: do not write to them before the call ends. Raises DeadlineExceeded,
        PeerGone, Overloaded, RemoteFailure, or what the handler raised (Retryable, Permanent, WireProtocolError).
        """
        started_s = time.monotonic()
        try:
            reply = await self._call(method, args, tensors, release, deadline, trace_id, peer)
        except TrirankError as error:
            self._outcomes[_FAILED.get(type(error), "failed")].inc()
            raise
        except asyncio.CancelledError:
            self._outcomes["cancelled"].inc()
            raise
        self._outcomes["ok"].inc()
        self._seconds.observe(time.monotonic() - started_s)
        return reply

    async def close(self) -> None:
        """Close every connection; calls in flight fail with PeerGone."""
        for connection in (*self._connections.values(), *self._retired):
            connection.close()
        self._connections.clear()
        self._retired.clear()
        self._recount()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _call(
        self,
        method: str,
        args: Mapping[str, Any] | None,
        tensors: Mapping[str, Array] | None,
        release: str,
        deadline: Deadline,
        trace_id: str,
        peer: str | None,
    ) -> Reply:
        left_s = deadline.remaining_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"{self._role}.{method}: no time left to call")
        connection = self._pick(release) if peer is None else self._named(peer, release)
        if len(connection.pending) >= self._max_in_flight:
            raise Overloaded(f"{connection.peer.name}: {self._max_in_flight} calls in flight")
        loop = asyncio.get_running_loop()
        future: Future = loop.create_future()
        connection.send(
            future,
            lambda call_id: encode_request(
                call_id,
                method,
                release=release,
                trace_id=trace_id,
                remaining_s=left_s,
                args=args,
                tensors=tensors,
            ),
        )
        timer = loop.call_later(left_s, self._give_up, future, method, connection)
        try:
            return await future
        finally:
            timer.cancel()

    def _give_up(self, future: Future, method: str, connection: Connection) -> None:
        if not future.done():
            future.set_exception(DeadlineExceeded(f"{connection.peer.name}.{method}: no reply in time"))

    def _pick(self, release: str) -> Connection:
        """The less busy of two live peers chosen at random."""
        live = self._live.get(release)
        if not live:
            raise PeerGone(f"no live peer of role {self._role}" + (f" and release {release}" if release else ""))
        if len(live) == 1:
            return live[0]
        one, other = live if len(live) == 2 else random.sample(live, 2)
        if len(one.pending) == len(other.pending):
            return one if random.random() < 0.5 else other
        return one if len(one.pending) < len(other.pending) else other

    def _named(self, name: str, release: str) -> Connection:
        connection = self._connections.get(name)
        if connection is None or connection.state is not State.LIVE:
            raise PeerGone(f"{name} is not live")
        if release and connection.release and connection.release != release:
            raise PeerGone(f"{name} serves release {connection.release}, not {release}")
        return connection

    def _meet(self, peer: Peer) -> None:
        if self._context is None:
            self._context = zmq.Context()
            self._context.max_sockets = 65535
        connection = Connection(peer, role=self._role, context=self._context, keys=self._curve, changed=self._recount)
        self._connections[peer.name] = connection
        connection.open()

    def _retire(self, connection: Connection) -> None:
        self._retired = {other for other in self._retired if other.state is not State.CLOSED}
        self._retired.add(connection)
        connection.retire()

    def _recount(self) -> None:
        """Rebuild what `_pick` reads: live peers by release, and all of them under ""."""
        live: dict[str, list[Connection]] = {"": []}
        for connection in self._connections.values():
            if connection.state is State.LIVE:
                live[""].append(connection)
                if connection.release:
                    live.setdefault(connection.release, []).append(connection)
        self._live = live
        self._change.set()


def _same_place(old: Peer, new: Peer) -> bool:
    return (old.address, old.release, old.public_key) == (new.address, new.release, new.public_key)
