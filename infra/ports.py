"""Ports for servers on loopback.

Not from those that the system gives to outgoing connections: one of these could take the port before the server is
there, or while it is restarted; a client that connects to such a port while nobody listens may be connected to itself.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

HOST = "127.0.0.1"
# Below lie the ports of known services, and those that Ray gives to its workers.
_FIRST = 20_000
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Where Linux begins, unless it is told otherwise.
_USUAL = 32_768
_TRIES = 100


def free_port() -> int:
    """A TCP port nobody listens on; one of those given to connections when no other was found."""
    n = _first_given_away() - _FIRST
    for _ in range(_TRIES if n > 0 else 0):
        port = _FIRST + secrets.randbelow(n)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nobody listens on a port."""
    with socket.socket() as probe:
        # Connections of a server that has just died linger; only a listener makes a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _first_given_away() -> int:
    try:
        return int(_GIVEN_AWAY.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL
