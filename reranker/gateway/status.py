"""What is running and whether it is well: for `/readyz` and `/v1/status`.

Asks each part itself, all at the same time and each with a short deadline; refuses to guess. Passwords in addresses
are not shown. Invariant: ready means that a request would be answered by every stage, and feedback accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from infra.deadline import Deadline
from infra.directory import Entry
from infra.errors import TrirankError
from infra.release import Manifest
from infra.wire.client import WireClient

CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """Redis or the broker: where it is, whether the stack brought it along, and how to ask whether it is well."""

    address: str
    embedded: bool
    check: Callable[[], Awaitable[str]]


class Status:
    """Readiness and status of the stack as this gateway sees it."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        n_shards: int,
        wires: dict[str, WireClient],
        stores: dict[str, Store],
        entries: Callable[[], Sequence[Entry]],
        load: Callable[[], dict[str, Any]],
    ) -> None:
        self._manifest = manifest
        self._n_shards = n_shards
        self._wires = wires
        self._stores = stores
        self._entries = entries
        self._load = load

    async def readiness(self) -> dict[str, Any]:
        """`ready`, and per dependency `ok` with a `detail`."""
        names = list(self._stores)
        checked = await asyncio.gather(*(self._check(self._stores[name]) for name in names))
        found = {
            "shards": self._shards_live(),
            **{stage: self._replicas_live(stage) for stage in ("edge", "rerank")},
            **dict(zip(names, checked, strict=True)),
        }
        return {"ready": all(part["ok"] for part in found.values()), "dependencies": found}

    async def report(self) -> dict[str, Any]:
        """Release, every process of the directory, shard health, Redis and Kafka."""
        readiness, shards = await asyncio.gather(self.readiness(), self._shard_health())
        manifest = self._manifest
        parts = readiness["dependencies"]
        return {
            "ready": readiness["ready"],
            "release": {
                "id": manifest.name,
                "generation": manifest.generation,
                "schema": manifest.schema_fingerprint,
                "created_us": manifest.created_us,
                "tables": {table.name: table.rows for table in manifest.tables},
            },
            "quality": manifest.report.get("models", {}),
            "processes": [self._process(entry) for entry in self._entries()],
            "shards": shards,
            **{
                name: {"address": shown(store.address), "embedded": store.embedded, **parts[name]}
                for name, store in self._stores.items()
            },
            "gateway": self._load(),
        }

    async def _check(self, store: Store) -> dict[str, Any]:
        try:
            async with asyncio.timeout(CHECK_S):
                return {"ok": True, "detail": await store.check()}
        except (TrirankError, TimeoutError) as error:
            return {"ok": False, "detail": str(error) or f"no answer within {CHECK_S:g} s"}

    def _shards_live(self) -> dict[str, Any]:
        live = {peer.meta.get("shard") for peer in self._wires["shard"].peers() if peer.live}
        missing = [index for index in range(self._n_shards) if index not in live]
        detail = f"shard {missing[0]} does not answer" if missing else f"{self._n_shards} of {self._n_shards}"
        return {"ok": not missing, "detail": detail}

    def _replicas_live(self, stage: str) -> dict[str, Any]:
        peers = [peer for peer in self._wires[stage].peers() if peer.release == self._manifest.name]
        live = sum(peer.live for peer in peers)
        return {"ok": live > 0, "detail": f"{live} of {len(peers)} replicas"}

    async def _shard_health(self) -> list[dict[str, Any]]:
        wire = self._wires["shard"]
        return list(await asyncio.gather(*(self._health_of(wire, peer.name) for peer in wire.peers())))

    async def _health_of(self, wire: WireClient, name: str) -> dict[str, Any]:
        try:
            reply = await wire.call("health", deadline=Deadline.after(CHECK_S), peer=name)
        except TrirankError as error:
            return {"name": name, "ok": False, "detail": str(error)}
        return {"name": name, "ok": True, **reply.args}

    def _process(self, entry: Entry) -> dict[str, Any]:
        wire = self._wires.get(entry.role)
        peer = next((p for p in wire.peers() if p.name == entry.name), None) if wire else None
        return {
            "role": entry.role,
            "name": entry.name,
            "pid": entry.pid,
            "host": entry.host,
            "address": entry.address,
            "release": entry.release,
            **({} if peer is None else {"live": peer.live, "in_flight": peer.in_flight}),
            **entry.meta,
        }


def shown(address: str) -> str:
    """An address without user and password."""
    if "://" not in address:
        return address
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or ''}{parts.path}"
