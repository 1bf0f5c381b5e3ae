"""A file system that is soon full, for tests of what happens then."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(at: Path, size: str = "1m") -> Iterator[Path]:
    """A file system in memory; mounting one needs the right to."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield at
    finally:
        # A table of this process may still have a file of it mapped.
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill_up(filler: Path) -> None:
    """Leave no byte."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
