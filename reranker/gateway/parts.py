"""The parts of one gateway, how they are put together, and how they are closed again, last first.

The only place that knows all of them. Refuses a release made with another schema. Invariant: what was opened is closed,
also when opening stops half-way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from feature_service.store import FeatureStore
from infra.clock import SystemClock
from infra.deadline import Deadline
from infra.directory import Announcer, DirectoryReader, Entry
from infra.errors import DeadlineExceeded, TrirankError
from infra.kafka import LogProducer, probe
from infra.release import Release
from infra.tasks import ended
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from reranker.gateway.admission import Admission
from reranker.gateway.config import GatewayConfig
from reranker.gateway.feedback import ACKNOWLEDGE_S, FeedbackLog
from reranker.gateway.impressions import Impressions
from reranker.gateway.served import Releases, prepare, serve
from reranker.gateway.shadow import Shadow
from reranker.gateway.status import CHECK_S, Status, Store
from reranker.gray.arms import Arms
from reranker.gray.attribution import Signer
from reranker.gray.control import Control
from reranker.gray.controller import Controller
from reranker.gray.follower import Follower
from reranker.gray.store import GrayStore

MAX_PENDING_EVENTS = 10_000
logger = logging.getLogger(__name__)

# Records of impressions wait for the broker at most this long and this many; then they are dropped.
MAX_PENDING_IMPRESSIONS = 50
IMPRESSION_S = 5.0
CLOSE_S = 2.0
# A gateway that starts waits this long for tiers that are not there.
MEET_S = 10.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes need."""

    arms: Arms
    releases: Releases
    control: Control
    signer: Signer
    control_token: str | None
    admission: Admission
    feedback: FeedbackLog
    impressions: Impressions
    shadow: Shadow
    status: Status
    default_deadline_ms: float


@asynccontextmanager
async def open_parts(config: GatewayConfig) -> AsyncIterator[Parts]:
    """Everything a gateway needs, started, for the loop it is opened in. Raises ReleaseRefused."""
    prepared = prepare(Path(config.release_dir), verify_files=False)
    release, schema = prepared.release, prepared.schema
    clock = SystemClock()
    signer = Signer(config.attribution_key)
    async with AsyncExitStack() as opened:
        rankers = {role: WireClient(role=role) for role in ("edge", "rerank")}
        for wire in rankers.values():
            opened.push_async_callback(wire.close)
        base = serve(config, prepared, rankers, signer, clock)
        releases = Releases(base, lambda other: serve(config, other, rankers, signer, clock))
        opened.push_async_callback(releases.close)
        wires, store = {"shard": base.shards, **rankers}, base.store
        entries = await opened.enter_async_context(_followed(config, rankers, releases))
        await _met(wires)
        arms = Arms(release.manifest.name, lease_s=config.gray_lease_s)
        name = f"gateway-{os.getpid()}-{secrets.token_hex(2)}"
        control = await opened.enter_async_context(_gray(config, arms, releases, name, entries, clock))
        events = _producer(opened, config, ACKNOWLEDGE_S, MAX_PENDING_EVENTS)
        shown = _producer(opened, config, IMPRESSION_S, MAX_PENDING_IMPRESSIONS)
        topic, partitions = config.feedback_topic, config.partitions
        impressions = Impressions(shown, topic, partitions, clock)
        opened.callback(impressions.flush)
        admission = Admission(config.max_in_flight)
        shadow = Shadow(arms, admission, releases.pipeline)
        opened.push_async_callback(shadow.close)
        parts = Parts(
            arms=arms,
            releases=releases,
            control=control,
            signer=signer,
            control_token=config.control_token,
            admission=admission,
            feedback=FeedbackLog(events, topic, partitions, schema.history_events, clock),
            impressions=impressions,
            shadow=shadow,
            status=_status(config, release, wires, store, entries, admission, arms),
            default_deadline_ms=config.deadline_ms,
        )
        announcer = Announcer(config.redis_url, config.stack, _own_entry(config, name, release, admission))
        announcer.start()
        opened.push_async_callback(asyncio.to_thread, announcer.stop)
        yield parts


async def _met(wires: Mapping[str, WireClient]) -> None:
    """Give every tier a moment to be there, so that a new gateway's first answers lack nothing that is alive."""
    deadline = Deadline.after(MEET_S)
    for role, wire in wires.items():
        try:
            await wire.wait_live(deadline=deadline)
        except DeadlineExceeded:
            logger.warning("a gateway starts without a tier", extra={"role": role})


@asynccontextmanager
async def _followed(
    config: GatewayConfig, rankers: Mapping[str, WireClient], releases: Releases
) -> AsyncIterator[Callable[[], Sequence[Entry]]]:
    """Keep the peers of every wire those of the directory; yields what the directory said last."""
    newest: list[Entry] = []

    def apply(entries: Sequence[Entry]) -> None:
        newest[:] = entries
        for role, wire in rankers.items():
            wire.set_peers([_peer(entry) for entry in entries if entry.role == role])
        releases.follow(entries)

    reader = DirectoryReader(config.redis_url, config.stack)
    watching = asyncio.create_task(reader.watch(apply))
    try:
        yield lambda: newest
    finally:
        await ended(watching)
        await reader.close()


def _peer(entry: Entry) -> Peer:
    return Peer(entry.name, entry.address, entry.release, entry.meta)


@asynccontextmanager
async def _gray(
    config: GatewayConfig,
    arms: Arms,
    releases: Releases,
    name: str,
    entries: Callable[[], Sequence[Entry]],
    clock: SystemClock,
) -> AsyncIterator[Control]:
    """Follow the gray release, and lead it whenever nobody else does."""
    store = GrayStore(config.redis_url, config.stack, arms.base)
    follower = Follower(store, arms, name, releases.load, clock)
    with suppress(TrirankError):
        # Without Redis a gateway begins with the release it was started with.
        await follower.look()
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(Controller(store, name, clock).run())]
    try:
        yield Control(store, arms.base, config.shards, entries, clock, lease_s=config.gray_lease_s)
    finally:
        await ended(*tasks)
        with suppress(TrirankError):
            await store.leave(name)
        await store.close()


def _producer(opened: AsyncExitStack, config: GatewayConfig, delivery_s: float, max_pending: int) -> LogProducer:
    producer = LogProducer(config.kafka, delivery_timeout_s=delivery_s, max_pending=max_pending)
    producer.start()
    opened.push_async_callback(asyncio.to_thread, producer.close, CLOSE_S)
    return producer


def _status(
    config: GatewayConfig,
    release: Release,
    wires: dict[str, WireClient],
    store: FeatureStore,
    entries: Callable[[], Sequence[Entry]],
    admission: Admission,
    arms: Arms,
) -> Status:
    async def check_redis() -> str:
        await store.ping(Deadline.after(CHECK_S))
        return "answers"

    async def check_kafka() -> str:
        broker = await asyncio.to_thread(probe, config.kafka, CHECK_S)
        return f"{broker.brokers} broker(s), {'durable' if broker.durable else 'its log is in memory'}"

    return Status(
        release.manifest,
        n_shards=config.shards,
        wires=wires,
        stores={
            "redis": Store(config.redis_url, config.embedded_redis, check_redis),
            "kafka": Store(config.kafka, config.embedded_kafka, check_kafka),
        },
        entries=entries,
        load=lambda: {
            "pid": os.getpid(),
            "in_flight": admission.in_flight,
            "shed": admission.shed,
            "split_version": arms.split.version,
            "fenced": arms.fenced,
        },
    )


def _own_entry(config: GatewayConfig, name: str, release: Release, admission: Admission) -> Callable[[], Entry]:
    def make() -> Entry:
        return Entry(
            role="gateway",
            name=name,
            address=f"http://{config.host}:{config.port}",
            release=release.manifest.name,
            generation=release.manifest.generation,
            pid=os.getpid(),
            host=socket.gethostname(),
            meta={"in_flight": admission.in_flight, "shed": admission.shed},
        )

    return make
