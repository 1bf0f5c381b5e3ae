"""kafka-python as `kafka.py` uses it: imported, mended where it must be, and its clients made.

It is pinned, because what is mended are internals: topics must not be made by asking for them (its switch for that does
nothing), neither what fails to connect nor what is closed may leak a thread or socket, and an answer must find the
class that reads it.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

with warnings.catch_warnings():
    # kafka-python reads its message schemas with a function that Python 3.11 and 3.12 call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    from kafka import errors as kafka_errors
    from kafka.net.compat import KafkaNetClient
    from kafka.net.inet import KafkaNetSocket
    from kafka.protocol.api_header import ResponseClassRegistry

from infra.errors import LogUnavailable

__all__ = ["kafka", "kafka_errors", "open_client"]


def _keep_the_first(response_class: Any) -> None:
    """Register the class that reads the answers of an API, unless there is one: the first is kept by its module.

    kafka-python makes a class of its own for each version of an answer when one first comes, and takes that (as a weak
    reference) for the class of all versions. When two threads make the same one at the same moment, the one that is
    registered may be the one that is thrown away: from the next garbage collection on no client of the process can read
    an answer of that kind, and each waits for ever.
    """
    ResponseClassRegistry._response_class_registry.setdefault(response_class.API_KEY, response_class)


ResponseClassRegistry.register_response_class = _keep_the_first


# By the loop of a client, which no other client uses.
_sockets: WeakKeyDictionary[Any, WeakSet[socket.socket]] = WeakKeyDictionary()


class _ClosingSocket(KafkaNetSocket):  # type: ignore[misc]
    """Closes a socket that could not connect; kafka-python leaves it to the garbage collector."""

    SCHEMES = ("direct",)

    async def sock_connect(self, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
        _sockets.setdefault(net, WeakSet()).add(sock)
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise


class _ClosingClient(KafkaNetClient):  # type: ignore[misc]
    """Closes its sockets with itself; kafka-python leaves one that still has something to send to the collector."""

    def close(self, node_id: Any = None) -> None:
        """Close one connection, or all of them and the loop."""
        super().close(node_id)
        if node_id is None:
            for sock in list(_sockets.pop(self._net, ())):
                sock.close()


def open_client(factory: Callable[..., Any], bootstrap: str, timeout_s: float, **config: Any) -> Any:
    """Make a client of kafka-python; when it cannot connect, and when it is closed, no thread or socket is left."""
    made: list[Any] = []

    def client(**client_config: Any) -> Any:
        made.append(_ClosingClient(**client_config))
        made[0].cluster.config["allow_auto_create_topics"] = False
        return made[0]

    try:
        return factory(
            bootstrap_servers=bootstrap.split(","),
            bootstrap_timeout_ms=timeout_s * 1000,
            reconnect_backoff_max_ms=500,
            proxy_url="direct://",
            kafka_client=client,
            **config,
        )
    except kafka_errors.KafkaError as error:
        for unused in made:
            unused.close()
        raise LogUnavailable(f"log: no Kafka broker answers at {bootstrap}: {error}") from error
