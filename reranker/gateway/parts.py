"""The parts of one gateway, how they are put together, and how they are closed again, last first.

The only place that knows all of them. Refuses a release made with another schema. Invariant: what was opened is closed,
also when opening stops half-way.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from feature_service.resolver import Resolver
from feature_service.schema import FeatureSchema, schema_of
from feature_service.store import FeatureStore
from infra.clock import SystemClock
from infra.deadline import Deadline
from infra.directory import Announcer, DirectoryReader, Entry
from infra.kafka import LogProducer, probe
from infra.release import Release, read_release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import ParameterClient
from param_server.specs import table_specs
from reranker.gateway.admission import Admission
from reranker.gateway.catalogue import Catalogue
from reranker.gateway.embeddings import Embeddings
from reranker.gateway.feedback import ACKNOWLEDGE_S, FeedbackLog
from reranker.gateway.impressions import Impressions
from reranker.gateway.pipeline import Pipeline
from reranker.gateway.ranker import Ranker
from reranker.gateway.registry import Registry
from reranker.gateway.replies import ReplyMaker
from reranker.gateway.status import CHECK_S, Status, Store
from reranker.gray.split import SplitPlan

ROLES = ("shard", "edge", "rerank")
MAX_PENDING_EVENTS = 10_000
# Records of impressions wait for the broker at most this long and this many; then they are dropped.
MAX_PENDING_IMPRESSIONS = 50
IMPRESSION_S = 5.0
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What one gateway needs; paths are absolute, because Ray starts it somewhere else."""

    host: str
    port: int
    release_dir: str
    stack: str
    redis_url: str
    kafka: str
    embedded_redis: bool
    embedded_kafka: bool
    feedback_topic: str
    shards: int
    partitions: int
    recall_k: int
    rerank_depth: int
    deadline_ms: float
    max_in_flight: int
    log_level: str = "INFO"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes need."""

    pipeline: Pipeline
    admission: Admission
    feedback: FeedbackLog
    impressions: Impressions
    status: Status
    default_deadline_ms: float


@asynccontextmanager
async def open_parts(config: GatewayConfig) -> AsyncIterator[Parts]:
    """Everything a gateway needs, started, for the loop it is opened in. Raises ReleaseRefused."""
    release = read_release(Path(config.release_dir), verify_files=False)
    schema = schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
    clock = SystemClock()
    async with AsyncExitStack() as opened:
        wires = {role: WireClient(role=role) for role in ROLES}
        for wire in wires.values():
            opened.push_async_callback(wire.close)
        store = FeatureStore(config.redis_url, config.stack, schema)
        opened.push_async_callback(store.close)
        entries = await opened.enter_async_context(_followed(config, wires))
        events = _producer(opened, config, ACKNOWLEDGE_S, MAX_PENDING_EVENTS)
        shown = _producer(opened, config, IMPRESSION_S, MAX_PENDING_IMPRESSIONS)
        topic, partitions = config.feedback_topic, config.partitions
        impressions = Impressions(shown, topic, partitions, clock)
        opened.callback(impressions.flush)
        admission = Admission(config.max_in_flight)
        parts = Parts(
            pipeline=_pipeline(config, release, schema, store, wires),
            admission=admission,
            feedback=FeedbackLog(events, topic, partitions, schema.history_events, clock),
            impressions=impressions,
            status=_status(config, release, wires, store, entries, admission),
            default_deadline_ms=config.deadline_ms,
        )
        announcer = Announcer(config.redis_url, config.stack, _own_entry(config, release, admission))
        announcer.start()
        opened.push_async_callback(asyncio.to_thread, announcer.stop)
        yield parts


def _pipeline(
    config: GatewayConfig, release: Release, schema: FeatureSchema, store: FeatureStore, wires: dict[str, WireClient]
) -> Pipeline:
    specs = table_specs(release)
    catalogue = Catalogue(release.catalogue())
    attribute_names = {name for user in release.users() for name in user.attributes}
    return Pipeline(
        plan=SplitPlan(stable=release.manifest.name),
        resolver=Resolver(store, schema, attribute_names),
        registry=Registry(store, catalogue, SystemClock()),
        embeddings=Embeddings(
            ParameterClient(wires["shard"], config.shards, config.partitions, specs),
            schema,
            catalogue,
            generation=release.manifest.generation,
            defaults={name: spec.default_row for name, spec in specs.items()},
            recall_k=config.recall_k,
        ),
        edge=Ranker(wires["edge"], "edge"),
        rerank=Ranker(wires["rerank"], "rerank"),
        replies=ReplyMaker(release.manifest, catalogue),
        rerank_depth=config.rerank_depth,
    )


@asynccontextmanager
async def _followed(
    config: GatewayConfig, wires: dict[str, WireClient]
) -> AsyncIterator[Callable[[], Sequence[Entry]]]:
    """Keep the peers of every wire those of the directory; yields what the directory said last."""
    newest: list[Entry] = []

    def apply(entries: Sequence[Entry]) -> None:
        newest[:] = entries
        for role, wire in wires.items():
            wire.set_peers([_peer(entry) for entry in entries if entry.role == role])

    reader = DirectoryReader(config.redis_url, config.stack)
    watching = asyncio.create_task(reader.watch(apply))
    try:
        yield lambda: newest
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await reader.close()


def _peer(entry: Entry) -> Peer:
    return Peer(entry.name, entry.address, entry.release if entry.role != "shard" else "", entry.meta)


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
        load=lambda: {"pid": os.getpid(), "in_flight": admission.in_flight, "shed": admission.shed},
    )


def _own_entry(config: GatewayConfig, release: Release, admission: Admission) -> Callable[[], Entry]:
    name = f"gateway-{os.getpid()}-{secrets.token_hex(2)}"

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
