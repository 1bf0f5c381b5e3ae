"""What a running stack says about itself in `run/state.json`, for the other commands and the gateways."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.settings import Settings


@dataclass(frozen=True, slots=True)
class StackState:
    """How to reach a running stack. `redis_pid` and `kafka_pid` are None when the server is not the stack's own."""

    guard_pid: int
    supervisor_pid: int
    url: str
    redis: str
    kafka: str
    redis_pid: int | None
    kafka_pid: int | None
    release: str
    stack: str
    shards: int
    partitions: int


def state_path(settings: Settings) -> Path:
    """The file of this home folder."""
    return settings.run_dir / "state.json"


def read_state(settings: Settings) -> StackState | None:
    """The running stack of this home folder, or None."""
    try:
        return StackState(**json.loads(state_path(settings).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def control_token(settings: Settings) -> str:
    """The token of the release API: the setting, or one made once for this home folder, readable by its owner only."""
    if settings.control_token is not None:
        return settings.control_token
    path = settings.home / "control-token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24))
    except FileExistsError:
        pass
    return path.read_text()


def write_state(settings: Settings, state: StackState) -> None:
    """Replace the file in one step."""
    path = state_path(settings)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(state), indent=2))
    draft.replace(path)
