"""How our zmq sockets are set up, and the two loops over the frames of a message."""

from __future__ import annotations

from typing import Any

import zmq

# Plain integers: the flags of pyzmq are enums, and combining those costs more than a frame does.
MORE = int(zmq.SNDMORE)
NO_WAIT = int(zmq.NOBLOCK)
_READABLE = int(zmq.POLLIN)
_MORE_NO_WAIT = MORE | NO_WAIT

# Handing a buffer over without a copy makes pyzmq's collector thread take part in every send; below this size a
# copy costs less processor time (measured by tests/bench/wire.py).
ZERO_COPY_BYTES = 512 * 1024
_MAX_FRAME_BYTES = 256 * 1024 * 1024
# Per connection, in each direction; more than one client may have in flight. A peer that does not read fills it and
# its further messages are dropped (server) or refused (client).
_QUEUE_MESSAGES = 4096
# What the kernel holds between two processes: rows of a whole request without waiting for the reader (it grants less
# where its own limit is lower).
_BUFFER_BYTES = 1024 * 1024
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 250
_HANDSHAKE_MS = 3000

Socket = zmq.Socket[bytes]


def configure(socket: Socket, address: str) -> None:
    """Options of every socket: bounded queues per connection; a peer that is silent for 3 s is gone."""
    socket.linger = 0
    socket.sndhwm = _QUEUE_MESSAGES
    socket.rcvhwm = _QUEUE_MESSAGES
    socket.sndbuf = _BUFFER_BYTES
    socket.rcvbuf = _BUFFER_BYTES
    socket.maxmsgsize = _MAX_FRAME_BYTES
    socket.ipv6 = "[" in address
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
    socket.reconnect_ivl = _RECONNECT_MS
    socket.reconnect_ivl_max = _RECONNECT_MAX_MS
    socket.copy_threshold = ZERO_COPY_BYTES


def send(socket: Socket, frames: list[Any]) -> None:
    """Send one message; buffers of ZERO_COPY_BYTES or more are not copied and must not change until sent."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _MORE_NO_WAIT if index < last else NO_WAIT
        socket.send(frame, flags, copy=not hasattr(frame, "nbytes") or frame.nbytes < ZERO_COPY_BYTES)


def readable(socket: Socket) -> bool:
    """Whether a message is there. Cheaper than to try and have an exception raised."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def receive(socket: Socket) -> list[Any]:
    """The frames of the next message, not copied. Raises zmq.Again when there is none."""
    frame = socket.recv(NO_WAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(NO_WAIT, copy=False)
        frames.append(frame)
    return frames
