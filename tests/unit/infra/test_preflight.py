"""What is refused before a stack starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra.errors import ConfigurationError
from infra.preflight import lock_run_dir, refuse_missing_gpu, refuse_taken_port
from infra.settings import Settings


def test_one_home_has_one_stack(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    settings.run_dir.mkdir(parents=True)
    with lock_run_dir(settings):
        with pytest.raises(ConfigurationError, match="already running"):
            lock_run_dir(settings)
    lock_run_dir(settings).close()


def test_a_taken_port_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="--port"):
            refuse_taken_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_unless_triton_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refuse_missing_gpu("auto")
    with pytest.raises(ConfigurationError, match="shard_device"):
        refuse_missing_gpu("cuda:0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refuse_missing_gpu("cuda")
