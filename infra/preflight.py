"""What stands in the way of a stack before anything is started: another one in the same home, a taken port, no GPU.

Refuses with what to do about it. Invariant: one home folder has one running stack.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from infra.errors import ConfigurationError
from infra.settings import Settings


def lock_run_dir(settings: Settings) -> IO[str]:
    """Held until it is closed, or this process ends. Raises ConfigurationError while another stack has it."""
    lock = (settings.run_dir / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigurationError(
            f"home: a stack is already running in {settings.home}; `trirank down` stops it, --home names another folder"
        ) from None
    return lock


def refuse_taken_port(host: str, port: int) -> None:
    """Raises ConfigurationError when nobody could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"port: {host}:{port} cannot be used ({error.strerror}); choose another with --port"
            ) from error


def refuse_missing_gpu(shard_device: str) -> None:
    """Raises ConfigurationError when shards are to use a GPU that this machine does not show."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if shard_device.startswith("cuda") and not interpreted and not Path("/dev/nvidiactl").exists():
        raise ConfigurationError(
            f"shard_device: {shard_device} is asked for, and this machine shows no NVIDIA GPU (no /dev/nvidiactl); "
            "install the driver, or set shard_device to auto or cpu"
        )
