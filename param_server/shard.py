"""One shard as a plain class: the tables of a release, kept current from the log, answered over the wire.

One thread, the wire server's, owns the tables: it answers a batch of requests, applies updates for at most
`apply_budget_s` (and one record), and looks at requests again; so a lookup sees a record whole or not at all, and no
lock is taken. Positions move in the step that writes the rows, and a snapshot holds both: a restart loads it, seeks
there and replays. Refuses snapshots of anybody else, and to claim freshness after records were lost.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from infra.clock import Clock, SystemClock
from infra.errors import Permanent, TrirankError
from infra.kafka import LogConsumer, LogProducer
from infra.release import Release
from infra.wire.messages import Hello, Reply, Request
from infra.wire.server import WireServer
from param_server import metrics
from param_server.config import ShardConfig
from param_server.deadletter import DeadLetters
from param_server.feed import Feed
from param_server.fetch import Tensors, fetch_all
from param_server.follower import Follower
from param_server.generation import Generation, Place, empty_generation
from param_server.images import Begun, Images
from param_server.keeper import SnapshotKeeper
from param_server.residence import Residence
from param_server.restore import Restored, restore
from param_server.routing import partitions_of_shard
from param_server.snapshot import LogState, Owner, SnapshotRefused, folder_of
from param_server.stream import StreamReader
from param_server.table import EmbeddingTable
from param_server.table.device import HOST, TableDevice
from param_server.tiering import Tiers

logger = logging.getLogger(__name__)

# A fetch costs more than a millisecond here and in an embedded broker; an update waits for half of this at most.
_HOLD_MS = 40

_OBSERVE_EVERY_S = 1.0
# The first replica drops old snapshots while others read them.
_READ_TRIES = 5
_SWITCH_S = 0.0005


class Shard:
    """`start()` returns the address when the first request can be answered at full speed."""

    def __init__(
        self, config: ShardConfig, release: Release, clock: Clock | None = None, device: TableDevice = HOST
    ) -> None:
        self._config = config
        self._device = device
        self._first = config.replica == 0
        self._release = release
        self._clock: Clock = clock or SystemClock()
        self._place = Place(config.index, config.n_shards, config.n_partitions)
        self._feed = Feed(config.feed_bytes)
        folder = folder_of(config.snapshot_root, config.n_shards, config.index)
        self._keeper = SnapshotKeeper(folder, config.snapshots, self._clock)
        self._producer = LogProducer(config.bootstrap)
        self._observed_s = 0.0
        self._tables: dict[int, Mapping[int, EmbeddingTable] | None] = {}
        generation = release.manifest.generation
        self._tiers = (
            Tiers(config.tiers, folder, generation, self._place, self._clock, self._device, config.replica)
            if config.tiers
            else None
        )
        self._images = Images(config.image_root) if config.image_root else None
        if device is not HOST or config.tiers:
            # Memory of a GPU is of one process, and a tier is no table that is filled once.
            self._images = None
        self._residence = Residence(self._images, self._clock)
        self._restored: Restored
        self._generation: Generation
        self._follower: Follower
        self._reader: StreamReader
        self._server: WireServer

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return bool(self._server.alive)

    def beside(self, generations: Collection[int]) -> None:
        """Pass over the updates of these generations: other shards serve them. From any thread, also before start."""
        for number in generations:
            self._tables.setdefault(number, None)

    def start(self) -> str:
        """Load, begin to follow the log, serve; the address. Raises ReleaseRefused, ConfigurationError."""
        # The thread that decodes the log would else hold the interpreter for 5 ms at a stretch, and lookups with it.
        sys.setswitchinterval(_SWITCH_S)
        self._device.prepare()
        if self._tiers is not None:
            self._tiers.start()
        self._restored = self._restore()
        self._generation = self._restored.generation
        hot = self._tiers.hot_tables() if self._tiers is not None else []
        self._device.warm([*self._generation.tables.values(), *hot])
        log = self._restored.log
        config = self._config
        letters = DeadLetters(self._producer, config.deadletter_topic, config.topic, self._clock, muted=not self._first)
        self._tables[self._generation.number] = self._generation.by_id
        self._follower = Follower(
            self._feed, letters, self._tables, log,
            n_partitions=config.n_partitions, created_us=self._generation.created_us, clock=self._clock,
        )  # fmt: skip
        if self._tiers is not None:
            self._tiers.follow(self._follower.progress, complete=self._follower.complete)
        self._producer.start()
        positions = {p: at.offset for p, at in log.positions.items()}
        identity = log.identity or None
        consumer = LogConsumer(
            config.bootstrap, config.topic, positions, positions=positions, identity=identity, hold_ms=_HOLD_MS
        )
        self._server = self._wire_server()
        self._reader = StreamReader(consumer, self._feed, self._server.wake)
        address: str = self._server.start()
        if self._tiers is not None:
            self._tiers.serve(self._server.wake)
        self._reader.start()
        return address

    def stop(self) -> None:
        """Stop serving, then the stream, then write a last snapshot."""
        self._server.stop()
        self._reader.stop()
        letters = self._follower.letters
        try:
            self._producer.flush(2.0)
        except TrirankError as error:
            logger.warning("dead letters are not acknowledged", extra={"error": error})
        letters.settle()
        if letters.pending:
            logger.warning("no last snapshot: the next start reads the refused records again")
        elif self._tiers is not None and self._tiers.unsettled:
            logger.warning("no last snapshot: writes wait for the cold tier; the next start reads them again")
        elif self._first and (self._follower.changed or self._keeper.behind):
            self._keeper.keep_now(*self._moment())
        self._keeper.wait()
        if self._tiers is not None:
            self._tiers.stop()
        self._producer.close(0.5)

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        """Answer a batch of requests, each by itself."""
        metrics.HANDLE_REQUESTS.observe(len(requests))
        with metrics.HANDLE_SECONDS.time():
            fetches = [request for request in requests if request.method == "fetch"]
            fetched = iter(fetch_all({self._generation.number: self._generation}, fetches))
            return [
                self._fetched(next(fetched)) if request.method == "fetch" else self._answer(request)
                for request in requests
            ]

    def between_batches(self) -> None:
        """Apply what the log brought, within the budget; begin a snapshot when one is due."""
        self._follower.set_highwater(self._reader.highwater, connected=self._reader.connected)
        if self._tiers is not None:
            self._tiers.turn(complete=self._follower.complete)
        held = self._tiers is not None and self._tiers.hold(snapshot_due=self._first and self._keeper.due)
        if not held and self._follower.step(self._config.apply_budget_s):
            self._server.wake()
        if (began := self._follower.take_began()) is not None and self._first:
            self._keeper.keep_start(self._owner(self._generation), began)
        if self._first:
            self._keep()
        if (now_s := self._clock.monotonic_s()) - self._observed_s >= _OBSERVE_EVERY_S:
            self._observed_s = now_s
            self._observe()

    def health(self) -> dict[str, Any]:
        """What this shard knows of itself; see the keys. For the owner thread."""
        follower, keeper, generation = self._follower, self._keeper, self._generation
        return {
            "index": self._config.index,
            "replica": self._config.replica,
            "n_shards": self._config.n_shards,
            "n_partitions": self._config.n_partitions,
            "release": generation.release,
            "device": self._device.name,
            "generations": [generation.number],
            **self._residence.health(generation.tables),
            "log_connected": self._reader.connected,
            **follower.health(),
            "snapshot": {
                **keeper.health(),
                "restored_from": self._restored.source,
                "refused": self._restored.refused,
            },
            **(self._tiers.health_of_shard(follower.complete) if self._tiers is not None else {}),
        }

    def _fetched(self, answer: Tensors | TrirankError) -> Reply | TrirankError:
        if isinstance(answer, TrirankError):
            return answer
        at = {"watermark_us": self._follower.watermark_us, "applied_us": self._follower.applied_us}
        return Reply({"generation": self._generation.number, **at}, answer)

    def _answer(self, request: Request) -> Reply | TrirankError:
        try:
            if request.method == "health":
                self._observe()
                return Reply(self.health(), {})
            if request.method == "snapshot" and self._first:
                number = self._keeper.ask(full=bool(request.args.get("full")))
                self._server.wake()
                return Reply({"number": number}, {})
            return Permanent(f"a shard has no method {request.method!r}")
        except TrirankError as error:
            return error

    def _keep(self) -> None:
        """Begin a snapshot when one is due, copy a slice of one that is under way."""
        keeper, follower = self._keeper, self._follower
        wanted = follower.changed or keeper.behind or keeper.asked
        # Positions must not become durable before the letters of the records they pass.
        settled = self._tiers is None or not self._tiers.unsettled
        if wanted and settled and keeper.due and not follower.letters.pending:
            keeper.begin(*self._moment())
        if keeper.advance(self._config.copy_budget_s):
            self._server.wake()

    def _restore(self) -> Restored:
        """Tables filled from what reaches furthest, and where they stand in the log."""
        config = self._config
        mine = partitions_of_shard(config.index, config.n_partitions, config.n_shards)
        restored = self._read_snapshots(mine, 1 if self._first else _READ_TRIES)
        if restored.goes_on is not None and self._first:
            self._keeper.go_on_from(restored.goes_on, restored.generation.tables)
        logger.info("tables are filled", extra={"source": restored.source})
        return restored

    def _read_snapshots(self, partitions: tuple[int, ...], tries: int) -> Restored:
        root, owner = self._config.snapshot_root, self._owner(self._empty())
        try:
            return restore(root, owner, partitions, self._release, self._empty, self._begin if self._images else None)
        except SnapshotRefused:
            if tries == 1:
                raise
            logger.info("a snapshot was dropped while it was read; taking a newer one")
            return self._read_snapshots(partitions, tries - 1)

    def _empty(self) -> Generation:
        return empty_generation(self._release, self._place, self._device, tiers=self._tiers, **self._config.room)

    def _begin(self) -> Begun:
        if self._images is None:
            raise ValueError("this shard has no images")
        return self._images.begin(self._release, self._place, **self._config.room)

    def _owner(self, generation: Generation) -> Owner:
        return Owner(
            generation=generation.number,
            schema_fingerprint=generation.schema_fingerprint,
            index=self._config.index,
            n_shards=self._config.n_shards,
            n_partitions=self._config.n_partitions,
            dims={name: table.dim for name, table in generation.tables.items()},
        )

    def _moment(self) -> tuple[Owner, LogState, Mapping[str, EmbeddingTable]]:
        """What a snapshot of this moment holds."""
        self._follower.changed = False
        return self._owner(self._generation), self._follower.log_state(), self._generation.tables

    def _wire_server(self) -> WireServer:
        generation = self._generation
        hello = Hello(
            role="shard",
            name=self._config.name,
            release=generation.release,
            generation=generation.number,
            schema=generation.schema_fingerprint,
        )
        return WireServer(
            bind=self._config.bind,
            hello=hello,
            handler=self,
            max_batch=self._config.max_batch,
            max_queue=self._config.max_queue,
            between_batches=self.between_batches,
        )

    def _observe(self) -> None:
        shard = str(self._config.index) if self._first else f"{self._config.index}r{self._config.replica}"
        metrics.LOG_LAG.labels(shard).set(sum(self._follower.lag().values()))
        metrics.WATERMARK.labels(shard).set(self._follower.watermark_us / 1e6)
        metrics.STALENESS.labels(shard).set(self._follower.staleness_s)
        self._residence.observe(shard, self._generation.tables)
        if self._tiers is not None:
            self._tiers.observe(shard)
