"""What a gateway imports of this package must stay light, and a shard must not need torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("param_server.client", ["numba", "torch", "ray", "kafka"]),
        ("param_server.specs", ["numba", "torch", "ray", "kafka", "zmq"]),
        ("param_server.publish", ["numba", "torch", "ray", "zmq"]),
        ("param_server.shard", ["torch", "ray"]),
    ],
)
def test_a_module_does_not_pull_in_what_it_does_not_need(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print(sorted(set({unwanted!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
