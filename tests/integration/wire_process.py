"""A wire server in a process of its own, for tests that kill it. Usage: wire_process.py ADDRESS NAME RELEASE.

Prints "ready", then the method of every request it takes. "echo" answers, "stick" never returns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from infra.wire import Hello, Reply, Request, WireServer


class _Echo:
    def __init__(self, name: str) -> None:
        self._name = name

    def handle(self, requests: Sequence[Request]) -> list[Reply]:
        for request in requests:
            print(request.method, flush=True)
            if request.method == "stick":
                threading.Event().wait()
        return [Reply({"name": self._name, **request.args}, request.tensors) for request in requests]


def main() -> None:
    """Serve until stdin closes."""
    address, name, release = sys.argv[1:]
    hello = Hello("edge", name, release, 1, "schema")
    server = WireServer(bind=address, hello=hello, handler=_Echo(name), max_batch=1, max_queue=64)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
