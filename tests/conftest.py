"""One trained release and one running stack for the whole session; both are made when first asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.running_stack import RunningStack, trirank

# Before anything imports Triton: without an NVIDIA driver its kernels run in the interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Speed is no property: a loaded machine must not fail a test.
settings.register_profile("trirank", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trirank")


@pytest.fixture(scope="session")
def release_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release trained on MovieLens-100K as `make serve` trains it; TEST_RELEASE names one to reuse."""
    if reused := os.environ.get("TEST_RELEASE"):
        return Path(reused)
    home = tmp_path_factory.mktemp("train")
    out = home / "ml100k"
    done = trirank("train", "--data", "movielens-100k", "--out", str(out), "--home", str(home), timeout_s=900)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def stack(release_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The whole stack with its embedded Redis and broker; Ray Serve's fast settings must not keep it from stopping."""
    fast = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    running = RunningStack(release_dir, tmp_path_factory.mktemp("stack"), settings=fast)
    running.start()
    yield running
    assert running.stop() == 0, running.log
