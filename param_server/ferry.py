"""Two threads between the tables of a shard and its cold tier: one reads, one writes; the owner thread never waits.

A read that fails is reported at once; a write is tried until it succeeds, which is safe because it takes effect once.
What is done lies in the lane of its table until the owner looks. Invariant: a row is reported stored only after Redis
acknowledged it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from infra.errors import RedisUnavailable
from param_server import metrics
from param_server.cold import ColdRows, ColdStore
from param_server.contract import I64, U64
from param_server.leaving import Departure

logger = logging.getLogger(__name__)

_IDLE_S = 0.25
_RETRY_S = 0.25
_MEET_S = 0.01
_READ = metrics.COLD_SECONDS.labels("read")
_WRITE = metrics.COLD_SECONDS.labels("write")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A read that is over; `rows` None when Redis did not answer."""

    number: int
    keys: I64
    rows: ColdRows | None


@dataclass(frozen=True, slots=True)
class Stored:
    """These rows, or newer ones, are in the cold tier."""

    rows: list[Departure]


@dataclass(frozen=True, slots=True)
class Floors:
    """Greatest versions below, by bucket; `lost`: what was stored before is gone."""

    versions: U64
    lost: bool


Event = Fetched | Stored | Floors


class Lane(Protocol):
    """The way of one table to the cold tier and back."""

    def read(self, number: int, keys: I64) -> None:
        """Ask for keys i64[n]."""
        ...

    def write(self, rows: list[Departure]) -> None:
        """Send rows down."""
        ...

    def take(self) -> list[Event]:
        """What has happened since the last look, in order."""
        ...


class Ferry:
    """`wake` is called when there is something to take; `known_id` is the data that this shard wrote to last; `gaps`
    are the partitions in which rows that are sent from now on may lack updates."""

    def __init__(self, store: ColdStore, wake: Callable[[], None], known_id: str) -> None:
        self._store = store
        self._wake = wake
        self._reads: queue.SimpleQueue[tuple[_TableLane, int, I64]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes: list[_TableLane] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._happened = threading.Condition()
        self._met = False
        self.known_id = known_id
        self.connected = False
        self.losses = 0
        self.gaps: Sequence[int] = ()

    def lane(self, table_id: int, dim: int) -> Lane:
        """The lane of one table."""
        lane = _TableLane(self, table_id, dim)
        self._lanes = [*self._lanes, lane]
        # It has yet to learn what lies below.
        self._met = False
        return lane

    def clear(self) -> None:
        """Forget the lanes of tables that are no longer served."""
        self._lanes = []

    def take_losses(self) -> int:
        """How often the cold tier was found to have lost its rows since the last look."""
        losses, self.losses = self.losses, 0
        return losses

    def start(self) -> None:
        """Start both threads; Redis may still be away."""
        for name, run in (("cold-reader", self._run_reads), ("cold-writer", self._run_writes)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End both threads and the connections; what is not acknowledged stays with the tables."""
        self._stopping.set()
        self._writes.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._store.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened; for a start that has nobody to serve yet."""
        with self._happened:
            self._happened.wait(timeout_s)

    def post(self, work: Callable[[ColdStore], None]) -> None:
        """Do something small with the store in the writing thread; dropped if Redis is away."""
        self._writes.put(partial(self._try, work))

    def read(self, lane: _TableLane, number: int, keys: I64) -> None:
        """For lanes."""
        self._reads.put((lane, number, keys))

    def write(self, lane: _TableLane, rows: list[Departure]) -> None:
        """For lanes."""
        self._writes.put(partial(self._write, lane, rows, self.gaps))

    def _run_reads(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._met:
                    self._meet()
                self._read_one()
            except RedisUnavailable as error:
                self._lose_sight(error)
                self._refuse_reads()
                self._stopping.wait(_RETRY_S)
            except Exception:
                # The outermost loop: rows that cannot be fetched are missing, and that must not end the thread.
                metrics.COLD_FAULTS.labels("read").inc()
                logger.exception("reading the cold tier failed in an unexpected way")
                self._stopping.wait(_RETRY_S)

    def _run_writes(self) -> None:
        while (work := self._writes.get()) is not None:
            try:
                work()
            except Exception:
                metrics.COLD_FAULTS.labels("post").inc()
                logger.exception("work for the cold tier failed in an unexpected way")

    def _meet(self) -> None:
        identity = self._store.identity()
        lost = self.known_id not in ("", identity)
        if lost:
            self.losses += 1
            logger.error("the cold tier has lost its rows; those that are still held here will be written again")
        if self._store.evicts():
            logger.error("Redis drops rows of the cold tier when it is full: set maxmemory-policy noeviction")
        # Set first: who adds a lane, or finds Redis away, from now on has it met again.
        self._met = True
        lanes = self._lanes
        floors = [self._store.floors(lane.table_id) for lane in lanes]
        self.known_id = identity
        for lane, versions in zip(lanes, floors, strict=True):
            self._tell(lane, Floors(versions, lost))
        self.connected = True

    def _read_one(self) -> None:
        try:
            lane, number, keys = self._reads.get(timeout=_IDLE_S)
        except queue.Empty:
            return
        try:
            with _READ.time():
                rows = self._store.read(lane.table_id, keys, lane.dim)
        except BaseException:
            self._tell(lane, Fetched(number, keys, None))
            raise
        self._tell(lane, Fetched(number, keys, rows))

    def _refuse_reads(self) -> None:
        while not self._reads.empty():
            lane, number, keys = self._reads.get()
            self._tell(lane, Fetched(number, keys, None))

    def _write(self, lane: _TableLane, rows: list[Departure], gaps: Sequence[int]) -> None:
        while not self._stopping.is_set():
            # What lies below must be known before it changes.
            if not (self._met and self.connected):
                self._stopping.wait(_MEET_S)
                continue
            try:
                with _WRITE.time():
                    self._store.write(lane.table_id, rows, gaps)
            except RedisUnavailable as error:
                self._lose_sight(error)
                self._stopping.wait(_RETRY_S)
            except Exception:
                # Rows that are given up would be on their way down for ever, and no others would go.
                metrics.COLD_FAULTS.labels("write").inc()
                logger.exception("writing to the cold tier failed in an unexpected way; trying again")
                self._stopping.wait(_RETRY_S)
            else:
                self._tell(lane, Stored(rows))
                return

    def _try(self, work: Callable[[ColdStore], None]) -> None:
        try:
            work(self._store)
        except RedisUnavailable as error:
            self._lose_sight(error)

    def _lose_sight(self, error: RedisUnavailable) -> None:
        metrics.COLD_FAILURES.inc()
        if self.connected:
            logger.warning("the cold tier does not answer; rows that are not held are missing", extra={"error": error})
        # Whoever comes back may have lost everything.
        self.connected = self._met = False

    def _tell(self, lane: _TableLane, event: Event) -> None:
        lane.events.append(event)
        with self._happened:
            self._happened.notify_all()
        self._wake()


class _TableLane:
    """`Lane` of one table."""

    def __init__(self, ferry: Ferry, table_id: int, dim: int) -> None:
        self._ferry = ferry
        self.table_id = table_id
        self.dim = dim
        self.events: deque[Event] = deque()

    def read(self, number: int, keys: I64) -> None:
        """Ask for keys."""
        self._ferry.read(self, number, keys)

    def write(self, rows: list[Departure]) -> None:
        """Send rows down."""
        self._ferry.write(self, rows)

    def take(self) -> list[Event]:
        """What has happened since the last look."""
        taken: list[Event] = []
        while self.events:
            taken.append(self.events.popleft())
        return taken
