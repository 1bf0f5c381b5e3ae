"""Which data in Redis a shard wrote to last, kept beside its snapshots, so that a restart notices when it is gone."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class ColdId(msgspec.Struct, frozen=True):
    """The id of that data, and how often such data was lost."""

    id: str = ""
    losses: int = 0


class ColdNote:
    """One small file for each generation and replica: a generation has data of its own, a replica looks for itself.
    What cannot be read is nothing; what cannot be written is told."""

    def __init__(self, folder: Path, generation: int, replica: int = 0) -> None:
        self._first = folder / f"cold-id-{generation}.json"
        self._path = self._first.with_suffix(f".r{replica}.json") if replica else self._first
        self.now = ColdId()

    def read(self) -> ColdId:
        """What was noted last; by the first replica, whose snapshots it starts from, where this one has no note."""
        noted = _read(self._path)
        self.now = (noted if noted is not None else _read(self._first)) or ColdId()
        return self.now

    def keep(self, identity: str, new_losses: int) -> None:
        """Note it, if it is another than before."""
        now = ColdId(identity or self.now.id, self.now.losses + new_losses)
        if now == self.now:
            return
        self.now = now
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(msgspec.json.encode(now))
        except OSError as error:
            logger.warning("the cold tier's id could not be kept", extra={"file": self._path, "error": error})


def _read(path: Path) -> ColdId | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ColdId)
    except (OSError, msgspec.DecodeError):
        return None
