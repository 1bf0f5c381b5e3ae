"""A rank replica in a process that cannot import what its image does not hold; told what to serve by its arguments.

    python -m tests.integration.replica_process CONFIG FORBIDDEN...

CONFIG is the JSON of a RankServerConfig. Prints one line of JSON when it serves (address, engines refused, modules that
were imported of those forbidden), and ends when its standard input does. A TensorRT engine gets as far as the GPU.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
from collections.abc import Sequence
from typing import Any


class Forbidden(importlib.abc.MetaPathFinder):
    """Ends the process at an import of one of these: no `except ImportError` hides it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] in self._names:
            raise SystemExit(f"{fullname} was imported")


def main() -> None:
    config, *forbidden = sys.argv[1:]
    sys.meta_path.insert(0, Forbidden(forbidden))
    import edge_ranker.replica  # noqa: F401 - what Ray imports
    from edge_ranker.rank_server import RankServer, RankServerConfig
    from infra.engine import offers
    from infra.engine.tensorrt import run

    # So that TensorRT is loaded and the GPU is what is missing.
    offers.require_driver = run.require_driver = lambda: None  # type: ignore[assignment]
    given = json.loads(config)
    server = RankServer(RankServerConfig(**{**given, "engines": tuple(given["engines"])}))
    address = server.start()
    state = server._engines.state()  # type: ignore[union-attr]
    print(json.dumps({"address": address, **state}), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
