"""Rows of a training in the shards of a stack: looked up over their sockets, changed through Kafka.

What was missing is assigned with the version of a release's own rows, so that the first of several trainers wins and
numbers added since stay; everything else is added, ordered by the log. A fetch that waits for a step asks the shards
how far they have applied the log, and compares offsets: an event time would not tell of a record that is on its way.
Refuses to go on when the log lost updates on the way. Invariant: a fetch never answers with a default row for a shard
that did not answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from infra.clock import Clock
from infra.deadline import Deadline
from infra.errors import TrirankError
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import ParameterClient
from param_server.contract import Op, TableSpec
from param_server.publish import LogWriter, Publisher
from param_server.routing import shard_of_partition
from reranker.remote.rows import Change, Rows, RowsRefused, RowsUnavailable

# The version that rows of a release have: below whatever the log orders.
FIRST_VERSION = 1
_CALL_S = 5.0
_LOOK_AGAIN_S = 0.2
_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.02


class StackRows:
    """`find` gives the shards of generation `generation` now; `log` is a started LogProducer, `topic` that of updates.

    `patience_s` bounds how long a fetch waits for shards that do not answer or do not apply.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[Peer]],
        log: LogWriter,
        *,
        topic: str,
        generation: int,
        schema_fingerprint: str,
        specs: Mapping[str, TableSpec],
        n_shards: int,
        n_partitions: int,
        clock: Clock,
        patience_s: float = 30.0,
    ) -> None:
        self._find = find
        self._publisher = Publisher(log, topic, n_partitions)
        self._generation = generation
        self._schema_fingerprint = schema_fingerprint
        self._specs = specs
        self._n_shards = n_shards
        self._n_partitions = n_partitions
        self._clock = clock
        self._patience_s = patience_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rows", daemon=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rows-out")
        self._wire: WireClient
        self._client: ParameterClient
        # Offsets after the last record of each step, per partition; and how far the shards are known to be.
        self._published: dict[int, Future[dict[int, int]]] = {}
        self._applied: dict[int, int] = {}
        self._losses: dict[str, int] = {}

    def start(self) -> None:
        """Connect to every shard. Raises RowsUnavailable."""
        self._thread.start()
        self._here(self._connect())

    def close(self) -> None:
        """Leave the shards; what was published stays."""
        self._writer.shutdown()
        self._here(self._wire.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def check(self, schema_fingerprint: str, n_rows: Mapping[str, int]) -> int:
        """Rows that the shards hold already. Raises RowsRefused unless they are for this schema and have room."""
        if schema_fingerprint != self._schema_fingerprint:
            raise RowsRefused(
                f"the stack's tables are made for feature schema {self._schema_fingerprint}, this log needs "
                f"{schema_fingerprint}: start the stack with a release that `trirank train --empty-tables` made from it"
            )
        held, room = 0, dict.fromkeys(n_rows, 0)
        for health in self._here(self._all_health()):
            for table in n_rows:
                held += health["tables"][table]["rows"]
                # With tiers below, what finds no room in memory goes to the cold one.
                room[table] += health["tables"][table]["capacity_rows"] if "tiers" not in health else n_rows[table]
        for table, needed in n_rows.items():
            if room[table] < needed:
                raise RowsRefused(
                    f"table {table} needs {needed:,} rows, the shards have room for {room[table]:,}: start the stack "
                    f"with TRIRANK_TABLE_MIN_CAPACITY_ROWS={int(1.2 * needed / self._n_shards) + 1} or more"
                )
        return held

    def counters(self) -> dict[str, int]:
        """What the shards have done since they started, added up: records, rows applied, refused, dead letters."""
        total: dict[str, int] = {}
        for health in self._here(self._all_health()):
            for name, count in health["counters"].items():
                total[name] = total.get(name, 0) + count
        return total

    def fetch(self, keys: Mapping[str, Any], applied: int) -> Future[Mapping[str, Rows]]:
        """See RowService."""
        for step in [step for step in self._published if step < applied]:
            del self._published[step]
        return asyncio.run_coroutine_threadsafe(self._fetch(keys, self._published.get(applied)), self._loop)

    def publish(self, step: int, changes: Sequence[Change]) -> None:
        """See RowService."""
        for earlier in self._published.values():
            if earlier.done() and (error := earlier.exception()) is not None:
                raise RowsUnavailable(f"changes could not be written to the log: {error}") from error
        self._published[step] = self._writer.submit(self._write, changes)

    def _write(self, changes: Sequence[Change]) -> dict[int, int]:
        now_us = self._clock.now_us()
        for change in changes:
            self._publisher.publish(
                Op.ASSIGN if change.first else Op.ADD,
                self._specs[change.table].table_id,
                self._generation,
                change.keys,
                change.rows,
                now_us,
                base_version=FIRST_VERSION if change.first else 0,
            )
        return self._publisher.flush()

    async def _connect(self) -> None:
        self._wire = WireClient(role="shard")
        self._wire.set_peers(self._find())
        self._client = ParameterClient(self._wire, self._n_shards, self._n_partitions, self._specs)
        try:
            await self._wire.wait_live(self._n_shards, deadline=Deadline.after(self._patience_s))
        except TrirankError as error:
            raise RowsUnavailable(f"not all {self._n_shards} shards answer: {error}") from error
        await self._all_health()

    async def _fetch(self, keys: Mapping[str, Any], published: Future[dict[int, int]] | None) -> Mapping[str, Rows]:
        end_s = self._clock.monotonic_s() + self._patience_s
        if published is not None:
            try:
                positions = await asyncio.wrap_future(published)
            except TrirankError as error:
                raise RowsUnavailable(f"changes could not be written to the log: {error}") from error
            await self._until_applied(positions, end_s)
        lookups = list(keys.items())
        while True:
            got = await self._client.fetch(
                generation=self._generation, lookups=lookups, topk=None, deadline=Deadline.after(_CALL_S)
            )
            if not got.missing_shards:
                return {table: Rows(got.rows[i], got.found[i]) for i, (table, _) in enumerate(lookups)}
            await self._look_again(f"shards {list(got.missing_shards)} do not answer", end_s)

    async def _until_applied(self, positions: Mapping[int, int], end_s: float) -> None:
        wait_s = _WAIT_S
        while behind := [p for p, offset in positions.items() if self._applied.get(p, 0) < offset]:
            shards = sorted({shard_of_partition(p, self._n_partitions, self._n_shards) for p in behind})
            silent = [shard for shard in shards if await self._health(shard) is None]
            if silent:
                await self._look_again(f"shards {silent} do not answer", end_s)
                continue
            if all(self._applied.get(p, 0) >= positions[p] for p in behind):
                return
            if self._clock.monotonic_s() > end_s:
                raise RowsUnavailable(
                    f"partitions {behind} were not applied within {self._patience_s:g} s; see `trirank status`"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _all_health(self) -> list[dict[str, Any]]:
        end_s = self._clock.monotonic_s() + self._patience_s
        found: list[dict[str, Any]] = []
        while len(found) < self._n_shards:
            health = await self._health(len(found))
            if health is None:
                await self._look_again(f"shard {len(found)} does not answer", end_s)
            else:
                found.append(health)
        return found

    async def _health(self, shard: int) -> dict[str, Any] | None:
        """What a shard says of itself, and notes how far it is: where it has replicas, how far all of them are. None
        when one does not answer. Raises RowsUnavailable when one lost updates since the first look."""
        names = [p.name for p in self._wire.peers() if p.live and p.meta.get("shard") == shard]
        try:
            replies = await asyncio.gather(
                *(self._wire.call("health", deadline=Deadline.after(_CALL_S), peer=name) for name in names)
            )
        except TrirankError:
            return None
        positions: dict[int, int] = {}
        for name, reply in zip(names, replies, strict=True):
            lost = reply.args["log_losses"] + reply.args["log_truncations"]
            if lost > self._losses.setdefault(name, lost):
                raise RowsUnavailable(
                    f"the log lost updates before {name} applied them, some of this training: train again"
                )
            for partition, offset in reply.args["positions"].items():
                positions[int(partition)] = min(offset, positions.get(int(partition), offset))
        self._applied.update(positions)
        return replies[0].args if replies else None

    async def _look_again(self, trouble: str, end_s: float) -> None:
        """Wait a moment and meet shards that started anew. Raises RowsUnavailable with `trouble` after `end_s`."""
        if self._clock.monotonic_s() > end_s:
            raise RowsUnavailable(f"{trouble} within {self._patience_s:g} s; see `trirank status`")
        await asyncio.sleep(_LOOK_AGAIN_S)
        self._wire.set_peers(await asyncio.to_thread(self._find))

    def _here(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
