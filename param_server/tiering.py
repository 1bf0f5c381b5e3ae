"""The tiers of one shard: which tables have them, their memory, their way to Redis, and the rows to have ready first.

A table that fits into its share of the budget stays a plain one, whole in memory. Invariant: what was acknowledged is
in the tables, on its way down, or in the cold tier; `unsettled` says when a snapshot would not hold that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infra.clock import Clock
from infra.errors import ConfigurationError, RedisUnavailable
from param_server import metrics
from param_server.cold import ColdRows, ColdStore
from param_server.coldnote import ColdNote
from param_server.contract import I64, U64, TableSpec
from param_server.ferry import Ferry
from param_server.holding import TierRules
from param_server.hotset import HotSet
from param_server.residents import Residents
from param_server.routing import partition_of, partitions_of_shard, shard_of
from param_server.table import Bool, EmbeddingTable, Export
from param_server.table.device import HOST, TableDevice, tier_in_host_memory
from param_server.table.evicting import bytes_for, warm
from param_server.table.tier import TierTable
from param_server.tiers import TieredTable
from param_server.updates import Progress, log_version

logger = logging.getLogger(__name__)

_WAIT_S = 0.25
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Tiering:
    """Settings of the tiers of one shard. Without `redis_url` there is no cold tier. Budgets are for all tables."""

    hot_bytes: int
    warm_bytes: int = 0
    redis_url: str | None = None
    stack: str = "trirank"
    rules: TierRules = field(default_factory=TierRules)
    hot_list_rows: int = 100_000
    hot_list_interval_s: float = 5.0


class Place(Protocol):
    """Which part of the key space a shard owns; see `generation.py`."""

    @property
    def index(self) -> int: ...
    @property
    def n_shards(self) -> int: ...
    @property
    def n_partitions(self) -> int: ...


class Tiers:
    """For one shard. `start` before the tables are filled, `serve` when they are, `turn` between batches."""

    def __init__(
        self, config: Tiering, folder: Path, generation: int, place: Place, clock: Clock,
        device: TableDevice = HOST, replica: int = 0,
    ) -> None:  # fmt: skip
        self._config = config
        self._device = device
        self._note = ColdNote(folder, generation, replica)
        self._place = place
        self._partitions = partitions_of_shard(place.index, place.n_partitions, place.n_shards)
        self._first = replica == 0
        self._clock = clock
        self._store = ColdStore(config.redis_url, f"{config.stack}:c:{generation}") if config.redis_url else None
        self._wake: Callable[[], None] = _nobody
        self._ferry: Ferry | None = None
        self._ids: dict[int, TieredTable] = {}
        self._names: dict[int, str] = {}
        self._hot_set = HotSet(config.hot_list_rows, self._owned)
        self._next_s = 0.0
        self._told: dict[str, dict[str, int]] = {}

    def start(self) -> None:
        """Compile what lookups will call; begin to look for Redis, which may be away."""
        warm()
        if self._store is not None:
            self._ferry = Ferry(self._store, lambda: self._wake(), self._note.read().id)
            self._ferry.start()

    def stop(self) -> None:
        """End the threads. Rows on their way down are in the last snapshot."""
        if self._ferry is not None:
            self._ferry.stop()
            self._note.keep(self._ferry.known_id, self._ferry.take_losses())

    def tables(self, specs: Mapping[str, TableSpec]) -> dict[str, EmbeddingTable]:
        """Empty tables; those made before are no longer served. Raises ConfigurationError."""
        wants = {name: self._device.bytes_for(spec) for name, spec in specs.items()}
        hot = shares(self._config.hot_bytes, wants)
        short = {name: spec for name, spec in specs.items() if hot[name] < wants[name]}
        # What is not hot, as large as it is in host memory.
        below = {name: int(bytes_for(spec.capacity_rows, spec.dim) * (1 - hot[name] / wants[name]))
                 for name, spec in short.items()}  # fmt: skip
        warm_shares = shares(self._config.warm_bytes, below)
        self._refuse_what_may_find_no_room(short)
        self._ids, self._names = {}, {}
        if self._ferry is not None:
            self._ferry.clear()
        return {
            name: self._tiered(spec, hot[name], warm_shares[name]) if name in short else self._device.plain(spec)
            for name, spec in specs.items()
        }

    def follow(self, progress: Mapping[int, Progress], *, complete: bool) -> None:
        """Take order from these positions, which move; `complete`: no update is known to be lost."""
        self._mark(complete)
        orders = partial(_orders, progress, self._place.n_partitions)
        for table in self._ids.values():
            table.follow(orders)

    def fill(self, table: TieredTable, state: Export, *, behind: bool) -> bool:
        """Put entries of distinct keys into an empty table; False when they do not fit. `behind`: the cold tier may
        hold newer rows than these, of a time that the log may no longer reach; waits for Redis then."""
        table_id = next(table_id for table_id, own in self._ids.items() if own is table)
        self._seed(table_id, table)
        cold = partial(self._read_cold, table_id, table.dim) if behind and self._store is not None else None
        return table.restore(state, self._pause, cold)

    def hot_tables(self) -> list[TierTable]:
        """The hot tier of each table that has tiers."""
        return [table.hot for table in self._ids.values()]

    def serve(self, wake: Callable[[], None]) -> None:
        """The tables are filled: begin to warm them up. `wake` is called when `turn` has something to do."""
        self._wake = wake
        wake()

    def turn(self, *, complete: bool) -> None:
        """Let the tables take in what has arrived and send what is to go; now and then, keep the hot lists."""
        self._mark(complete)
        for table in self._ids.values():
            table.turn()
        self._hot_set.turn(self._ids)
        now_s = self._clock.monotonic_s()
        if self._ferry is not None and now_s >= self._next_s:
            ready = self._hot_set.ready(self._ids)
            self._next_s = now_s + (self._config.hot_list_interval_s if ready else _RETRY_S)
            self._note.keep(self._ferry.known_id, self._ferry.take_losses())
            if ready and self._first:
                self._hot_set.write(self._ids, self._ferry.post, self._place.index, self._place.n_shards)
            elif not ready:
                self._hot_set.ask(self._ids, self._ferry.post)

    def hold(self, *, snapshot_due: bool) -> bool:
        """Whether the stream should wait: for room, or for a moment in which a snapshot can be taken."""
        connected = self._ferry is not None and self._ferry.connected
        return any(table.hold or (snapshot_due and connected and table.waiting) for table in self._ids.values())

    @property
    def unsettled(self) -> bool:
        """Whether a snapshot must wait."""
        return any(table.unsettled for table in self._ids.values())

    def health(self) -> dict[str, Any]:
        """Tiers of each table that has them, the way to Redis, and whether the rows asked for most are here."""
        ferry = self._ferry
        return {
            "cold": ferry is not None,
            "cold_connected": ferry is not None and ferry.connected,
            "cold_losses": self._note.now.losses,
            "cold_complete": self._cold_complete,
            "cold_damaged_rows": self._store.damaged if self._store is not None else 0,
            "lists_written": self._hot_set.written,
            "warm": ferry is None or self._hot_set.ready(self._ids),
            "tables": {
                self._names[table_id]: {**table.health(), "warm_up": self._hot_set.health(table_id)}
                for table_id, table in self._ids.items()
            },
        }

    def health_of_shard(self, complete: bool) -> dict[str, Any]:
        """What the tiers add to the health of a shard: a cold tier that lost its rows, or to which a shard wrote that
        had lost updates, makes it incomplete."""
        complete = complete and self._note.now.losses == 0 and self._cold_complete
        return {"complete": complete, "tiers": self.health()}

    def observe(self, shard: str) -> None:
        """Bring the metrics up to date."""
        for table_id, table in self._ids.items():
            health = table.health()
            answered = {**health["hits"], "missing": health["misses"]}
            moved = {"promoted": health["promoted"], "demoted": health["demoted"], "stored": health["cold"]["stored"]}
            moved["dropped"] = health["cold"]["dropped"]
            fills = {outcome: health["cold"][outcome] for outcome in ("filled", "absent", "failed", "late")}
            counters = ((metrics.TIER_ROWS, answered), (metrics.TIER_MOVES, moved), (metrics.TIER_FILLS, fills))
            told = self._told.setdefault(self._names[table_id], {})
            for counter, now in counters:
                for label, count in now.items():
                    counter.labels(label).inc(count - told.get(label, 0))
                told.update(now)
        metrics.TIER_LEAVING.labels(shard).set(sum(table.leaving for table in self._ids.values()))

    @property
    def _cold_complete(self) -> bool:
        return self._store is None or not self._store.has_gaps(self._partitions)

    def _owned(self, keys: I64) -> Bool:
        return np.asarray(shard_of(keys, self._place.n_partitions, self._place.n_shards) == self._place.index)

    def _mark(self, complete: bool) -> None:
        if self._ferry is not None:
            self._ferry.gaps = () if complete else self._partitions

    def _tiered(self, spec: TableSpec, hot_bytes: int, warm_bytes: int) -> TieredTable:
        rules = self._config.rules
        hot = self._device.hot(spec, hot_bytes, rules.policy)
        below: TierTable | None = tier_in_host_memory(spec, warm_bytes, rules.policy) if warm_bytes else None
        lane = self._ferry.lane(spec.table_id, spec.dim) if self._ferry is not None else None
        table = TieredTable(Residents(hot, below), rules, lane, self._clock)
        self._ids[spec.table_id], self._names[spec.table_id] = table, spec.name
        return table

    def _refuse_what_may_find_no_room(self, specs: Mapping[str, TableSpec]) -> None:
        if specs and self._store is None and not self._device.takes_any_row and not self._config.warm_bytes:
            raise ConfigurationError(
                f"tier_cold: off, but the hot tier of {', '.join(specs)} on {self._device.name} is sure of no row; "
                "turn the cold tier on, or set tier_warm_bytes so that all rows fit there"
            )

    def _seed(self, table_id: int, table: TieredTable) -> None:
        if self._store is not None:
            try:
                self._hot_set.take(table_id, table, self._store.hot(table_id))
            except RedisUnavailable as error:
                logger.warning("the rows asked for most are not known yet", extra={"error": error})

    def _read_cold(self, table_id: int, dim: int, keys: I64) -> ColdRows:
        while True:
            try:
                if self._store is None:
                    raise RedisUnavailable("there is no cold tier")
                return self._store.read(table_id, keys, dim)
            except RedisUnavailable as error:
                logger.warning("a first start needs the cold tier; trying again", extra={"error": error})
                threading.Event().wait(_RETRY_S)

    def _pause(self) -> None:
        if self._ferry is not None:
            self._ferry.wait(_WAIT_S)


def shares(budget_bytes: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Divide a budget: nobody gets more than he wants, and whoever gets less gets as much as any other. Pure."""
    given: dict[str, int] = {}
    left = budget_bytes
    for i, (name, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
        given[name] = min(want, left // (len(wants) - i))
        left -= given[name]
    return given


def _orders(progress: Mapping[int, Progress], n_partitions: int, keys: I64) -> U64:
    by_partition = np.zeros(n_partitions, np.uint64)
    for partition, at in progress.items():
        by_partition[partition] = log_version(at.offset, at.log_epoch)
    return by_partition[partition_of(keys, n_partitions)]


def _nobody() -> None:
    """Nobody is to be woken yet."""
