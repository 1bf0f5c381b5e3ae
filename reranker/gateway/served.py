"""The releases one gateway can serve: the one it was started with, and those of the gray release.

Each has a pipeline of its own, with its catalogue, schema, tables and shards, so that a request never meets parts of
two releases. What was loaded stays loaded: coming back to it costs nothing. Refuses a directory that is not the release
it is said to be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feature_service.resolver import Resolver
from feature_service.schema import FeatureSchema, schema_of
from feature_service.store import FeatureStore
from infra.clock import Clock
from infra.directory import Entry
from infra.errors import ReleaseRefused
from infra.release import Manifest, Release, read_release
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from param_server.client import ParameterClient
from param_server.contract import TableSpec
from param_server.specs import table_specs
from reranker.gateway.catalogue import Catalogue
from reranker.gateway.config import GatewayConfig
from reranker.gateway.embeddings import Embeddings
from reranker.gateway.pipeline import Pipeline
from reranker.gateway.ranker import Ranker
from reranker.gateway.registry import Registry
from reranker.gateway.replies import ReplyMaker
from reranker.gray.attribution import Signer
from reranker.gray.store import Current

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What of a release is read from its directory: everything slow."""

    release: Release
    schema: FeatureSchema
    catalogue: Catalogue
    attributes: frozenset[str]
    specs: Mapping[str, TableSpec]


@dataclass(frozen=True, slots=True)
class Served:
    """One release: `shards` are the wires to its own tables, `store` reads histories as its schema wants them."""

    manifest: Manifest
    schema: FeatureSchema
    pipeline: Pipeline
    shards: WireClient
    store: FeatureStore

    async def close(self) -> None:
        """Give everything back."""
        await self.shards.close()
        await self.store.close()


def prepare(path: Path, *, verify_files: bool) -> Prepared:
    """Read a release for serving. Raises ReleaseRefused."""
    release = read_release(path, verify_files=verify_files)
    attributes = frozenset(name for user in release.users() for name in user.attributes)
    schema = schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
    return Prepared(release, schema, Catalogue(release.catalogue()), attributes, table_specs(release))


def serve(
    config: GatewayConfig, prepared: Prepared, rankers: Mapping[str, WireClient], signer: Signer, clock: Clock
) -> Served:
    """Put a prepared release together; `rankers` are the wires to edge and rerank, which know releases themselves."""
    release, schema, catalogue, specs = prepared.release, prepared.schema, prepared.catalogue, prepared.specs
    shards = WireClient(role="shard")
    store = FeatureStore(config.redis_url, config.stack, schema)
    pipeline = Pipeline(
        resolver=Resolver(store, schema, prepared.attributes),
        registry=Registry(store, catalogue, clock),
        embeddings=Embeddings(
            ParameterClient(shards, config.shards, config.partitions, specs),
            schema,
            catalogue,
            generation=release.manifest.generation,
            defaults={name: spec.default_row for name, spec in specs.items()},
            recall_k=config.recall_k,
        ),
        edge=Ranker(rankers["edge"], "edge"),
        rerank=Ranker(rankers["rerank"], "rerank"),
        replies=ReplyMaker(release.manifest, catalogue, signer, clock),
        rerank_depth=config.rerank_depth,
    )
    return Served(release.manifest, schema, pipeline, shards, store)


class Releases:
    """All releases this gateway has loaded. For one event loop."""

    def __init__(self, base: Served, serve_one: Callable[[Prepared], Served]) -> None:
        self._serve_one = serve_one
        self._served = {base.manifest.name: base}
        self._entries: Sequence[Entry] = ()
        self._refused: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """Releases that can be served."""
        return sorted(self._served)

    def pipeline(self, release: str) -> Pipeline:
        """The pipeline of a release that is loaded."""
        return self._served[release].pipeline

    def follow(self, entries: Sequence[Entry]) -> None:
        """Keep the shards of every release those of the directory."""
        self._entries = entries
        for name, served in self._served.items():
            mine = [entry for entry in entries if entry.role == "shard" and entry.release == name]
            served.shards.set_peers([Peer(entry.name, entry.address, "", entry.meta) for entry in mine])

    async def load(self, current: Current) -> Collection[str]:
        """Load what the gray release needs; the names of all that can be served."""
        for name, path in current.release.paths.items() if current.release else ():
            if name not in self._served and (name, path) not in self._refused:
                await self._load(name, Path(path))
        return self.names

    async def close(self) -> None:
        """Give everything back."""
        for served in self._served.values():
            await served.close()

    async def _load(self, name: str, path: Path) -> None:
        try:
            prepared = await asyncio.to_thread(prepare, path, verify_files=False)
            check_name(prepared.release, name)
        except ReleaseRefused as refused:
            # A directory does not heal; another gray release may name a better one.
            self._refused.add((name, str(path)))
            logger.error("a release cannot be served", extra={"release": name, "reason": str(refused)})
            return
        self._served[name] = self._serve_one(prepared)
        self.follow(self._entries)
        logger.info("a release can be served", extra={"release": name})


def check_name(release: Release, name: str) -> None:
    """Raises ReleaseRefused when the directory holds another release."""
    if release.manifest.name != name:
        raise ReleaseRefused(f"{release.path} is release {release.manifest.name}, not {name}")
