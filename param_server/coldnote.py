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
    """One small file. What cannot be read is nothing; what cannot be written is told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now = ColdId()

    def read(self) -> ColdId:
        """What was noted last."""
        try:
            self.now = msgspec.json.decode(self._path.read_bytes(), type=ColdId)
        except (OSError, msgspec.DecodeError):
            self.now = ColdId()
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
