"""The guarded reader of a log: it knows every way in which a log can fail its reader, and none goes unnoticed.

Knows no Kafka: the connection is handed in. Refuses to reset a position. Invariant: `poll` returns only records of
the log that the positions belong to, and none before the ones that lie in front of it; when that log is gone or no
longer has them, it raises a LogGap for each partition until the reader has seeked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from infra.errors import LogUnavailable, Permanent, TrirankError
from infra.fetch_wait import HOLD_MS, FetchPace
from infra.log import TIMEOUT_S, LogGap, LogLink, LogLost, LogTruncated, OutOfRange, Record, is_durable
from infra.log_holes import Holes

logger = logging.getLogger(__name__)

# A broker that is busy (starting beside everything else, say) may need longer than the first timeout to let a client
# in: each failed attempt is followed by one twice as patient. No longer than this, because nobody can be stopped during
# an attempt.
_MOST_PATIENT_S = 10.0

# A client that has no connection for so long, or whose questions go unanswered, is replaced by a new one: the broker
# may be away, but the client may also have lost itself.
_GIVEN_UP_AFTER_S = 15.0


class GuardedReader:
    """Reads given partitions of one topic from given positions. For one thread.

    `positions` maps a partition to the offset of the next record wanted (0 when absent). `identity` is the
    `topic_identity` they belong to; None takes whatever log is there. `hold_ms`: how long an embedded broker holds an
    empty fetch; half of it is what a record waits at most.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: Collection[int],
        *,
        positions: Mapping[int, int],
        identity: str | None = None,
        hold_ms: int = HOLD_MS,
    ) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._next = {p: positions.get(p, 0) for p in sorted(partitions)}
        self._identity = identity
        self._open_link: LogLink | None = None
        self._verified, self._gaps = list[object](), dict[int, LogGap]()
        self._pace, self._holes = FetchPace(hold_ms), Holes()
        self._patience_s = TIMEOUT_S
        self._heard_s = 0.0

    def _connect(self, timeout_s: float) -> LogLink:
        """Connect and seek to `self._next`. Raises LogUnavailable when broker or topic are not there."""
        raise NotImplementedError

    def start(self) -> None:
        """Connect and seek. Raises LogUnavailable when broker or topic are not there; may then be called again, and
        tries for twice as long (3 s at first, 10 s at most)."""
        try:
            self._open_link = self._connect(self._patience_s)
        except LogUnavailable:
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENT_S)
            raise
        self._patience_s = TIMEOUT_S
        self._heard_s = time.monotonic()
        self._check_identity()
        self._tune_wait(idle=False)

    @property
    def identity(self) -> str:
        """`topic_identity` the positions belong to, to be kept with them; empty before the first start."""
        return self._identity or ""

    @property
    def durable(self) -> bool:
        """Whether the broker keeps acknowledged records when it dies."""
        return is_durable(self._identity)

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        """Next records, in offset order within each partition; empty when none came within `timeout_s`.

        While the broker is away it returns nothing and connects again by itself. Raises LogGap for a partition whose
        records are gone, at every call until `seek`; nothing is read meanwhile. Raises LogUnavailable.
        """
        self._raise_gap()
        self._mind_link()
        try:
            fetched = self._fetch(timeout_s, max_records)
            if not fetched:
                # The embedded broker answers a fetch beyond the end with nothing: an end before the position is a loss.
                self._note_gaps({p for p, end in self.highwater().items() if end < self._next[p]})
                self._raise_gap()
        except TrirankError:
            self._rewind()
            raise
        self._tune_wait(idle=not fetched)
        return [record for batch in fetched.values() for record in batch]

    def seek(self, partition: int, offset: int) -> None:
        """Read `partition` from `offset` on; settles a gap that was reported for it."""
        self._gaps.pop(partition, None)
        self._next[partition] = offset
        self._link.seek(partition, offset)

    def highwater(self) -> dict[int, int]:
        """Offset after the newest record of each partition, as of the last fetch; absent before the first."""
        seen = ((p, self._link.highwater(p)) for p in self._next)
        return {p: offset for p, offset in seen if offset is not None}

    def positions(self) -> dict[int, int]:
        """Offset of the next record `poll` will return, per partition."""
        return dict(self._next)

    def earliest(self, timeout_s: float = TIMEOUT_S) -> dict[int, int]:
        """First offset the log still has, per partition. Raises LogUnavailable."""
        return self._link.earliest(timeout_s)

    def connected(self) -> bool:
        """Whether a connection to the broker stands."""
        return self._open_link is not None and bool(self._open_link.connections())

    def close(self) -> None:
        """Close the connections; may be called twice."""
        if self._open_link is not None:
            self._open_link.close()
            self._open_link = None

    @property
    def _link(self) -> LogLink:
        if self._open_link is None:
            raise Permanent("log: the consumer is not started")
        return self._open_link

    def _fetch(self, timeout_s: float, max_records: int) -> dict[int, list[Record]]:
        try:
            fetched = self._link.fetch(timeout_s, max_records)
            same = self._same_log()
        except OutOfRange as error:
            self._note_gaps(error.partitions)
            same = False
        if not same:
            self._rewind()
            return {}
        if not self.durable:
            fetched = {p: self._without_holes(p, records) for p, records in fetched.items()}
        self._next.update({p: self._link.position(p) for p in fetched})
        return {p: records for p, records in fetched.items() if records}

    def _without_holes(self, partition: int, records: list[Record]) -> list[Record]:
        """The records up to the first hole, which is fetched again until it is filled or counts as lost. A log that is
        kept on disk has holes for good reasons (compaction, ends of transactions) and shows nothing too early."""
        at = self._next[partition]
        n, lost = self._holes.whole(partition, at, [record.offset for record in records], time.monotonic())
        if n < len(records):
            self._link.seek(partition, at + n)
        if lost:
            self._gaps[partition] = LogTruncated(partition, at + n, records[n].offset, "the log has nothing there")
        return records[:n]

    def _rewind(self) -> None:
        """Forget what was fetched and not returned."""
        for partition, offset in self._next.items():
            self._link.seek(partition, offset)

    def _mind_link(self) -> None:
        """Replace a link that has stood still for too long."""
        connections, now_s = self._link.connections(), time.monotonic()
        if connections and all(c in self._verified for c in connections) and self.highwater():
            self._heard_s = now_s
        elif now_s - self._heard_s > _GIVEN_UP_AFTER_S:
            self._heard_s = now_s
            try:
                link = self._connect(TIMEOUT_S)
            except LogUnavailable:
                return
            logger.warning("a client of the log stood still and is replaced", extra={"topic": self._topic})
            self._link.close()
            self._open_link, self._verified = link, []
            self._pace.forget()

    def _raise_gap(self) -> None:
        for gap in self._gaps.values():
            raise gap

    def _note_gaps(self, partitions: Collection[int]) -> None:
        earliest = self.earliest() if partitions else {}
        for p in partitions:
            position, first = self._next[p], earliest[p]
            if position < first:
                self._gaps[p] = LogTruncated(p, position, first, "the log no longer reaches back")
            elif position > first:
                self._gaps[p] = LogLost(p, position, first, "the log was lost or made anew")

    def _same_log(self) -> bool:
        """False when what was just fetched may belong to another log than the positions do.

        A broker that lost its log has lost its connections too: after a new connection the identity is asked for
        again, and until that is answered nothing counts as read.
        """
        connections = self._link.connections()
        if not all(c in self._verified for c in connections):
            if not self._link.refresh_identity(TIMEOUT_S):
                return False
            self._verified = connections
        return self._check_identity()

    def _check_identity(self) -> bool:
        found = self._link.identity()
        if found is None:
            return False
        same = self._identity in (None, found)
        if not same:
            self._note_gaps({p for p, position in self._next.items() if position > 0})
        self._identity = found
        return same

    def _tune_wait(self, *, idle: bool) -> None:
        ends = self.highwater()
        behind = idle and self.connected() and any(end > self._next[p] for p, end in ends.items())
        wait_ms = self._pace.next_ms(ends, durable=self.durable, behind=behind, now_s=time.monotonic())
        if wait_ms is not None:
            self._link.hold_fetches(wait_ms)
