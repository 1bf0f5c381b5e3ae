"""`python -m tests.gateway_process CONFIG`: one gateway as a process of its own, until its input ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from reranker.gateway.config import GatewayConfig
from reranker.gateway.http import opened_app
from reranker.gateway.server import GatewayServer


@contextmanager
def gateway_process(config: GatewayConfig) -> Iterator[subprocess.Popen[str]]:
    """The process, while it serves; it may be stopped and continued."""
    given = json.dumps({**asdict(config), "attribution_key": config.attribution_key.hex()})
    command = [sys.executable, "-m", "tests.gateway_process", given]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "serving\n":
            raise AssertionError("the gateway did not start")
        yield process
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Serve."""
    given = json.loads(sys.argv[1])
    config = GatewayConfig(**{**given, "attribution_key": bytes.fromhex(given["attribution_key"])})
    server = GatewayServer(config.host, config.port, lambda: opened_app(config))
    server.start()
    print("serving", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
