"""When a shard is snapshotted and how: begun in one moment, copied in slices between requests, written by a thread.

Holds no table. One snapshot is under way at a time; most are deltas that go on from the one before. A failed one is
counted and tried again at the next interval, with all that changed since the last good one. Invariant: a table is held
up no longer than one slice, and what is written is the tables and positions of the moment it was begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.clock import Clock
from param_server import metrics
from param_server.chain import Chain, prune
from param_server.snapshot import LogState, Owner, Snapshot, Stored, new_id, write_snapshot
from param_server.table import Capture, Capturing, CapturingWhole, EmbeddingTable, Export

logger = logging.getLogger(__name__)

# About a megabyte of rows of 64 numbers: a third of a millisecond.
_SLICE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Keeping:
    """`interval_s` lies between the starts of two snapshots; `deltas` between two full ones; `full` ones are kept."""

    interval_s: float = 30.0
    full: int = 2
    deltas: int = 8


@dataclass(frozen=True, slots=True)
class _Base:
    """What the next delta goes on from: the last good snapshot, and the captures that belong to it."""

    stored: Stored
    numbers: dict[str, int]
    deltas: int


@dataclass(slots=True)
class _Copying:
    """A snapshot being copied. `rest` are captures not yet whole; `covers` the requests it answers."""

    snapshot: Snapshot
    pieces: dict[str, list[Export]]
    rest: list[tuple[str, Capture]]
    numbers: dict[str, int]
    covers: int
    deltas: int


class SnapshotKeeper:
    """For the owner thread of the tables. `behind` says that the last snapshot failed."""

    def __init__(self, folder: Path, keeping: Keeping, clock: Clock) -> None:
        self._folder = folder
        self._keeping = keeping
        self._clock = clock
        self._last_s = clock.monotonic_s()
        self._thread: threading.Thread | None = None
        self._copying: _Copying | None = None
        self._base: _Base | None = None
        self._asked = 0
        self._answered = 0
        self._full_next = False
        self._written = 0
        self._failed = 0
        self._error = ""
        self._newest: Stored | None = None
        self.behind = False

    @property
    def due(self) -> bool:
        """Whether it is time, or somebody asked, and nothing is under way."""
        if self._copying is not None or (self._thread is not None and self._thread.is_alive()):
            return False
        return self.asked or self._clock.monotonic_s() - self._last_s >= self._keeping.interval_s

    @property
    def asked(self) -> bool:
        """Whether somebody waits for a snapshot."""
        return self._answered < self._asked

    def ask(self, *, full: bool = False) -> int:
        """Have one taken soon; `health()["answered"]` reaches this number when it is written or has failed."""
        self._full_next = self._full_next or full
        self._asked += 1
        return self._asked

    def go_on_from(self, chain: Chain, tables: Mapping[str, EmbeddingTable]) -> None:
        """The tables are just filled from this chain: the next snapshot may be a delta to it."""
        numbers = {name: table.mark() for name, table in tables.items() if isinstance(table, Capturing)}
        if len(numbers) == len(tables):
            self._base = _Base(chain.head, numbers, len(chain.links) - 1)
        self._newest = chain.head

    def begin(self, owner: Owner, log: LogState, tables: Mapping[str, EmbeddingTable]) -> None:
        """Begin a snapshot of this moment; `advance` copies it."""
        self._last_s = self._clock.monotonic_s()
        base = self._base
        if self._full_next or (base is not None and base.deltas >= self._keeping.deltas):
            base = None
        self._full_next = False
        pieces: dict[str, list[Export]] = {name: [] for name in tables}
        rest: list[tuple[str, Capture]] = []
        numbers: dict[str, int] = {}
        for name, table in tables.items():
            if isinstance(table, Capturing):
                capture = table.capture(base.numbers[name] if base else 0)
                rest.append((name, capture))
                numbers[name] = capture.number
            elif isinstance(table, CapturingWhole):
                rest.append((name, table.capture_all()))
            else:
                pieces[name].append(table.export())
        snapshot = Snapshot(
            kind="delta" if base else "full",
            id=new_id(),
            owner=owner,
            taken_us=self._clock.now_us(),
            log=log,
            tables=pieces,
            base=base.stored.manifest.id if base else "",
            base_log=base.stored.manifest.log if base else None,
        )
        self._copying = _Copying(snapshot, pieces, rest, numbers, self._asked, base.deltas + 1 if base else 0)

    def advance(self, budget_s: float) -> bool:
        """Copy for about `budget_s` seconds, at least one slice; whether there is more. Hands over what is whole."""
        if (copying := self._copying) is None:
            return False
        if not self._copy(copying, budget_s):
            return True
        self._copying = None
        self._thread = threading.Thread(target=self._write, args=(copying,), name="snapshot-writer")
        self._thread.start()
        return False

    def keep_now(self, owner: Owner, log: LogState, tables: Mapping[str, EmbeddingTable]) -> None:
        """Take and write one in the calling thread, after the one being written."""
        self.wait()
        self.begin(owner, log, tables)
        if (copying := self._copying) is not None:
            self._copying = None
            self._copy(copying, float("inf"))
            self._write(copying)

    def keep_start(self, owner: Owner, log: LogState) -> None:
        """Note, in a thread, where in the log a shard begins that has nothing but its release."""
        snapshot = Snapshot("start", new_id(), owner, self._clock.now_us(), log, {})
        self.wait()
        self._thread = threading.Thread(target=self._note_start, args=(snapshot,), name="snapshot-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the one being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def health(self) -> dict[str, Any]:
        """Counts, the newest snapshot, requests and which of them are answered, and why the last one failed."""
        newest = self._newest.manifest if self._newest else None
        return {
            "written": self._written,
            "failed": self._failed,
            "error": self._error,
            "newest": self._newest.folder.name if self._newest else "",
            "kind": newest.kind if newest else "",
            "taken_us": newest.taken_us if newest else 0,
            "rows": sum(newest.rows.values()) if newest else 0,
            "asked": self._asked,
            "answered": self._answered,
        }

    def _copy(self, copying: _Copying, budget_s: float) -> bool:
        """Whether everything is copied."""
        start_s = self._clock.monotonic_s()
        while copying.rest:
            name, capture = copying.rest[-1]
            piece = capture.take(_SLICE_ROWS)
            if piece is None:
                copying.rest.pop()
            elif piece.keys.size:
                copying.pieces[name].append(piece)
            if self._clock.monotonic_s() - start_s >= budget_s:
                break
        metrics.SNAPSHOT_SLICE_SECONDS.observe(self._clock.monotonic_s() - start_s)
        return not copying.rest

    def _write(self, copying: _Copying) -> None:
        start_s = self._clock.monotonic_s()
        try:
            stored = write_snapshot(self._folder, copying.snapshot)
        except OSError as error:
            self._fail(error)
        else:
            self._newest = stored
            if len(copying.numbers) == len(copying.pieces):
                self._base = _Base(stored, copying.numbers, copying.deltas)
            self._written += 1
            self._error = ""
            self.behind = False
            with contextlib.suppress(OSError):
                # What could not be dropped is dropped after the next one.
                prune(self._folder, self._keeping.full)
            metrics.SNAPSHOT_SECONDS.observe(self._clock.monotonic_s() - start_s)
        self._answered = copying.covers

    def _note_start(self, snapshot: Snapshot) -> None:
        try:
            self._newest = write_snapshot(self._folder, snapshot)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed += 1
        self._error = str(error)
        self.behind = True
        metrics.SNAPSHOT_FAILURES.inc()
        logger.error("a snapshot could not be written", extra={"folder": self._folder, "error": error})
