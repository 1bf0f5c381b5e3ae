"""Checkpoints of a fit: one file that is always whole, and what it belongs to.

Holds parameters, optimiser state, the loss scale, the best pass, the position in the data and torch's and numpy's
generators. Refuses a checkpoint of other data, another recipe, seed or version, and says what differs.
Invariant: at any moment, a process that is killed leaves the newest complete checkpoint behind, or none.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from infra.clock import Clock
from infra.errors import ReleaseRefused

FORMAT = 1
_FILE = "checkpoint.pt"
_LOCK = "lock"


class Draft:
    """The hidden folder beside a release in which its unfinished training lies; one process at a time."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f".{out.name}.draft")
        self._lock = -1

    def __enter__(self) -> Draft:
        """Take it for this process. Raises ReleaseRefused when another one has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ReleaseRefused(f"{self.path}: another process is training this release; wait for it") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it; when nothing in it is worth keeping, it goes."""
        if not (self.path / _FILE).is_file():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def discard(self) -> None:
        """The release is complete: throw away what led to it."""
        (self.path / _FILE).unlink(missing_ok=True)


class Checkpoints:
    """The checkpoint in one draft. `identity` is what a fit must have in common with the one it goes on from, as JSON
    values; `rng` is the generator whose state is kept too."""

    def __init__(
        self, draft: Path, identity: Mapping[str, Any], rng: np.random.Generator, *, every_s: float, clock: Clock
    ) -> None:
        self._draft = draft
        self._path = draft / _FILE
        self._identity = {"format": FORMAT, **json.loads(json.dumps(identity))}
        self._rng = rng
        self._every_s = every_s
        self._clock = clock
        self._saved_s = clock.monotonic_s()
        self._resume = False

    def open(self, *, resume: bool) -> bool:
        """True when there is a checkpoint, which `load` gives if `resume`, and which is thrown away if not."""
        found = self._path.is_file()
        self._resume = resume and found
        if found and not resume:
            self._path.unlink()
        return found

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self._clock.monotonic_s() - self._saved_s >= self._every_s

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint in one step."""
        whole = {
            "identity": json.dumps(self._identity),
            "state": dict(state),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy_rng": json.dumps(self._rng.bit_generator.state),
        }
        beside = self._path.with_suffix(".tmp")
        with beside.open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._draft, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._saved_s = self._clock.monotonic_s()

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, None for a fit from the start; sets both generators. Raises ReleaseRefused when it
        is not of this fit or cannot be read."""
        if not self._resume:
            return None
        again = f"train again without --resume, which discards {self._path}"
        try:
            with zipfile.ZipFile(self._path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"{damaged} has another checksum")
            whole = torch.load(self._path, map_location="cpu", weights_only=True)
            theirs = json.loads(whole["identity"])
        except (OSError, zipfile.BadZipFile, KeyError, pickle.UnpicklingError) as error:
            raise ReleaseRefused(f"{self._path} cannot be read ({error}); {again}") from error
        if different := list(_differences(theirs, self._identity)):
            raise ReleaseRefused(f"{self._path} is of another training: {'; '.join(different)}; {again}")
        torch.set_rng_state(whole["torch_rng"])
        if whole["cuda_rng"]:
            torch.cuda.set_rng_state_all(whole["cuda_rng"])
        self._rng.bit_generator.state = json.loads(whole["numpy_rng"])
        state: dict[str, Any] = whole["state"]
        return state


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    found = []
    for name in sorted({*theirs, *ours}):
        was, now = theirs.get(name), ours.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += [f"{name}.{difference}" for difference in _differences(was, now)]
        elif was != now:
            found.append(f"{name} was {was!r}, is {now!r}")
    return found
