"""Encryption between machines: CURVE keys, and which addresses may do without.

Refuses (ConfigurationError) any address that other machines can reach when there are no keys. A server admits the
holders of its own key pair (one stack shares one pair) and of the keys it lists; nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
import zmq.auth.thread

from infra.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair, Z85 text of 40 characters each; `allowed` are further client keys a server admits."""

    public_key: str
    secret_key: str = field(repr=False)
    allowed: frozenset[str] = frozenset()

    @classmethod
    def generate(cls) -> CurveKeys:
        """A new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in ("ipc", "inproc"):
        return True
    return host in ("localhost", "::1") or (host.startswith("127.") and host.count(".") == 3)


def require_keys(address: str, *, has_keys: bool) -> None:
    """Raises ConfigurationError for an address that others can reach when there are no keys."""
    if not has_keys and not is_local(address):
        raise ConfigurationError(f"{address}: is not loopback and there are no CURVE keys; give keys")


def secure_server(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: CurveKeys
) -> _Authenticator:
    """Make a socket admit only known keys; the authenticator returned must be stopped before the context ends."""
    admitted = {keys.public_key, *keys.allowed}
    authenticator = _Authenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_Admits(admitted))
    socket.curve_server = True
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    return authenticator


def secure_client(socket: zmq.Socket[bytes], keys: CurveKeys, server_key: str) -> None:
    """Make a socket talk only to the holder of `server_key`. Raises ConfigurationError for what is not a key."""
    try:
        socket.curve_publickey = keys.public_key.encode()
        socket.curve_secretkey = keys.secret_key.encode()
        socket.curve_serverkey = server_key.encode()
    except (zmq.ZMQError, UnicodeEncodeError) as error:
        raise ConfigurationError("a CURVE key is 40 characters of Z85") from error


class _Authenticator(zmq.auth.thread.ThreadAuthenticator):
    """Answers libzmq's question whether a client key is admitted."""


class _Admits:
    def __init__(self, admitted: set[str]) -> None:
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client key (Z85) is one of ours."""
        return key.decode() in self._admitted
