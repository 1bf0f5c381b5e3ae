"""When a shard is snapshotted, and the thread that writes: copies on the owner's thread, bytes to disk beside it.

Holds no table. One snapshot is written at a time; a failed one is counted and tried again at the next interval.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from infra.clock import Clock
from param_server import metrics
from param_server.snapshot import Snapshot, write_snapshot

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """`interval_s` lies between the starts of two snapshots; `behind` says that the last one failed."""

    def __init__(self, directory: Path, interval_s: float, clock: Clock) -> None:
        self._directory = directory
        self._interval_s = interval_s
        self._clock = clock
        self._last_s = clock.monotonic_s()
        self._thread: threading.Thread | None = None
        self.behind = False
        self.written = 0
        self.failed = 0
        self.newest: Path | None = None
        self.newest_taken_us = 0

    @property
    def due(self) -> bool:
        """Whether it is time and nothing is being written."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and self._clock.monotonic_s() - self._last_s >= self._interval_s

    def keep(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot now, write it in a thread."""
        self._last_s = self._clock.monotonic_s()
        self._thread = threading.Thread(target=self._write, args=(take(),), name="snapshot-writer")
        self._thread.start()

    def keep_now(self, snapshot: Snapshot) -> None:
        """Write this one in the calling thread, after any that is being written."""
        self.wait()
        self._write(snapshot)

    def wait(self) -> None:
        """Wait for the one being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        start_s = self._clock.monotonic_s()
        try:
            self.newest = write_snapshot(self._directory, snapshot)
        except OSError as error:
            self.failed += 1
            self.behind = True
            metrics.SNAPSHOT_FAILURES.inc()
            logger.error("a snapshot could not be written", extra={"folder": self._directory, "error": error})
            return
        self.written += 1
        self.behind = False
        self.newest_taken_us = snapshot.taken_us
        metrics.SNAPSHOT_SECONDS.observe(self._clock.monotonic_s() - start_s)
