"""The owner thread's side of the stream: takes records from the feed, applies them, knows how far that is.

No I/O. Invariant: rows and positions move in one step, so `log_state()` between two steps belongs to the tables.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infra.clock import Clock
from param_server import metrics
from param_server.deadletter import DeadLetters
from param_server.feed import Feed, Gap, LogChange
from param_server.snapshot import LogState, Position
from param_server.table import EmbeddingTable
from param_server.updates import Outcome, Progress, StreamRecord, apply_records

logger = logging.getLogger(__name__)

# Of 64 numbers each: about two milliseconds. What is larger came as one record and is seen as one.
_MOST_ROWS_TOGETHER = 8192
_LEAST_ROWS_TOGETHER = 1024
# A table whose pages are still to be copied takes ten times as long; what took this many budgets is halved next time.
_LONG = 4.0
_APPLIED = metrics.UPDATE_ROWS.labels("applied")
_STALE = metrics.UPDATE_ROWS.labels("stale")
_REFUSED = metrics.UPDATE_ROWS.labels("refused")


class Follower:
    """`generations[generation][table_id]` are the tables, None those that other shards serve; `log` is where to go on;
    `created_us` the release's time."""

    def __init__(
        self,
        feed: Feed,
        letters: DeadLetters,
        generations: Mapping[int, Mapping[int, EmbeddingTable] | None],
        log: LogState,
        *,
        n_partitions: int,
        created_us: int,
        clock: Clock,
    ) -> None:
        self._feed = feed
        self.letters = letters
        self._generations = generations
        self._n_partitions = n_partitions
        self._created_us = created_us
        self._clock = clock
        self._identity = log.identity
        self._progress = log.progress()
        self._losses = log.losses
        self._truncations = log.truncations
        self._highwater: Mapping[int, int] = {}
        self._caught_up_us = clock.now_us()
        self._behind = True
        self._rows_together = _MOST_ROWS_TOGETHER
        self._began: LogState | None = None
        self._counts = {"records": 0, "repeated": 0, "applied": 0, "stale": 0, "refused": 0, "dead_letters": 0}
        self.changed = False
        self.applied_us = 0
        self.watermark_us = self._watermark_us()

    def step(self, budget_s: float) -> bool:
        """Apply records for about `budget_s` seconds, at least one; whether more can be applied now."""
        self.letters.settle()
        if self._feed.empty or self.letters.full:
            return False
        start_s = now_s = self._clock.monotonic_s()
        while not self.letters.full and (item := self._feed.take_run(self._rows_together)) is not None:
            if isinstance(item, LogChange):
                self._follow(item)
            else:
                self._apply(item)
            before_s, now_s = now_s, self._clock.monotonic_s()
            self._rows_together = _rows_to_join(self._rows_together, now_s - before_s, budget_s)
            if now_s - start_s >= budget_s:
                break
        self.changed = True
        self.watermark_us = self._watermark_us()
        metrics.APPLY_SECONDS.observe(self._clock.monotonic_s() - start_s)
        return not self._feed.empty

    def set_highwater(self, highwater: Mapping[int, int], *, connected: bool = True) -> None:
        """Take in how far the log reaches, and whether that is still being heard."""
        if highwater is not self._highwater:
            self._highwater = highwater
            self.watermark_us = self._watermark_us()
        self._behind = not connected or not highwater or any(self.lag().values())
        if not self._behind:
            self._caught_up_us = self._clock.now_us()

    @property
    def complete(self) -> bool:
        """Whether no update is known to be lost."""
        return self._losses == 0 and self._truncations == 0

    @property
    def progress(self) -> Mapping[int, Progress]:
        """How far each partition is applied; it moves."""
        return self._progress

    @property
    def staleness_s(self) -> float:
        """Seconds since everything the log held was applied; 0 while it is."""
        return (self._clock.now_us() - self._caught_up_us) / 1e6 if self._behind else 0.0

    def take_began(self) -> LogState | None:
        """Where in the log this shard began, once, if it had no position before."""
        began, self._began = self._began, None
        return began

    def lag(self) -> dict[int, int]:
        """Records not applied yet, per partition, as far as known."""
        return {p: max(0, self._highwater.get(p, 0) - at.offset) for p, at in self._progress.items()}

    def log_state(self) -> LogState:
        """Where the tables stand in the log."""
        positions = {p: Position(at.offset, at.log_epoch, at.event_time_us) for p, at in self._progress.items()}
        return LogState(self._identity, positions, self._losses, self._truncations)

    def health(self) -> dict[str, Any]:
        """Positions, lag, how often the log was lost or cut off, and counts of rows since the start of this process."""
        return {
            "positions": {p: at.offset for p, at in self._progress.items()},
            "lag": self.lag(),
            "watermark_us": self.watermark_us,
            "staleness_s": self.staleness_s,
            "applied_us": self.applied_us,
            "log_identity": self._identity,
            "log_epoch": max((at.log_epoch for at in self._progress.values()), default=0),
            "log_losses": self._losses,
            "log_truncations": self._truncations,
            "complete": self.complete,
            "dead_letters_pending": self.letters.pending,
            "dead_letters_skipped": self.letters.skipped,
            "counters": dict(self._counts),
        }

    def _apply(self, records: list[StreamRecord]) -> None:
        outcome = apply_records(records, self._generations, self._progress, self._n_partitions)
        self._count(len(records), outcome)
        for letter in outcome.letters:
            self.letters.put(letter)
        self.applied_us = self._clock.now_us()
        if outcome.applied:
            metrics.UPDATE_AGE_SECONDS.observe(max(0, self.applied_us - outcome.oldest_us) / 1e6)

    def _count(self, records: int, outcome: Outcome) -> None:
        self._counts["records"] += records
        self._counts["repeated"] += outcome.repeated
        self._counts["applied"] += outcome.applied
        self._counts["stale"] += outcome.stale
        self._counts["refused"] += outcome.refused
        self._counts["dead_letters"] += len(outcome.letters)
        _APPLIED.inc(outcome.applied)
        _STALE.inc(outcome.stale)
        _REFUSED.inc(outcome.refused)

    def _follow(self, change: LogChange) -> None:
        first_sight = not self._identity
        self._identity = change.identity
        mourned = []
        for gap in change.gaps:
            at = self._progress[gap.partition]
            at.offset = gap.resume_at
            if gap.lost:
                # Offsets start again: without the epoch, everything new would look older than what is stored.
                at.log_epoch += 1
            elif first_sight and gap.position == 0:
                # This shard begins where the log begins; nothing it should have seen is gone.
                continue
            self._mourn(gap)
            mourned.append(gap)
        # Once for the log, however many partitions it had.
        self._losses += any(gap.lost for gap in mourned)
        self._truncations += any(not gap.lost for gap in mourned)
        if first_sight:
            self._began = self.log_state()

    def _mourn(self, gap: Gap) -> None:
        metrics.LOG_GAPS.labels("lost" if gap.lost else "truncated").inc()
        logger.error(
            "updates were lost before they could be applied; publish them again",
            extra={"partition": gap.partition, "position": gap.position, "resume_at": gap.resume_at},
        )

    def _watermark_us(self) -> int:
        """Event time up to which everything is applied: that of the slowest partition that lags, else the latest."""
        lag = self.lag()
        behind = [at.event_time_us for p, at in self._progress.items() if lag[p]]
        times = [min(behind)] if behind else [at.event_time_us for at in self._progress.values()]
        return max(self._created_us, *times) if times else self._created_us


def _rows_to_join(rows: int, took_s: float, budget_s: float) -> int:
    """How many rows of neighbouring records to apply together, after as many as `rows` took some time."""
    if took_s > _LONG * budget_s:
        return max(rows // 2, _LEAST_ROWS_TOGETHER)
    return min(rows * 2, _MOST_ROWS_TOGETHER) if took_s < _LONG / 2 * budget_s else rows
