"""One process of a ranking tier: a verified engine behind a socket, announced in the directory.

Both tiers are this class with another model. Refuses to serve a release whose recorded requests it does not score as
the trained models did. Invariant: an announced replica has been verified and warmed up.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from edge_ranker.recorded import recorded_inputs
from edge_ranker.verify import Role, verify, warm_up
from feature_service.schema import schema_of
from infra.directory import Announcer, Entry
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.rank import RankHandler
from infra.errors import PeerGone
from infra.garbage import settle
from infra.release import Release, read_release
from infra.wire.messages import Hello
from infra.wire.server import WireServer

logger = logging.getLogger(__name__)

# Replies of a batch leave together; on a CPU a larger batch runs no faster per request, it only holds them back.
MAX_BATCH = 8
MAX_QUEUE = 256
# Paths of UNIX sockets end at 107 bytes; beyond this the replica listens on loopback instead.
MAX_SOCKET_PATH = 100


@dataclass(frozen=True, slots=True)
class RankServerConfig:
    """What one replica needs; paths are absolute, because Ray starts it somewhere else."""

    role: Role
    release_dir: str
    redis_url: str
    stack: str
    run_dir: str
    log_level: str = "INFO"


class RankServer:
    """Serves the edge ranker or the reranker of one release."""

    def __init__(self, config: RankServerConfig) -> None:
        self._config = config
        self._server: WireServer | None = None
        self._announcer: Announcer | None = None

    def start(self) -> str:
        """Load, verify, warm up, listen, announce; the address. Raises ReleaseRefused or ConfigurationError."""
        config = self._config
        release = read_release(Path(config.release_dir), verify_files=False)
        manifest = release.manifest
        schema = schema_of(manifest.schema, manifest.schema_fingerprint)
        engine = OnnxEngine(release.edge_model if config.role == "edge" else release.rerank_model)
        engine.load()
        handler = RankHandler(engine, manifest.name, token_dim=schema.token_dim, user_dim=schema.user_dim)
        verify(handler, recorded_inputs(release), config.role)
        warm_up(handler, schema)
        name = f"{config.role}-{os.getpid()}-{secrets.token_hex(2)}"
        server = WireServer(
            bind=bind_address(Path(config.run_dir), name),
            hello=Hello(config.role, name, manifest.name, manifest.generation, manifest.schema_fingerprint),
            handler=handler,
            max_batch=MAX_BATCH,
            max_queue=MAX_QUEUE,
        )
        address = server.start()
        self._server = server
        self._announcer = Announcer(
            config.redis_url, config.stack, lambda: self._entry(name, address, release, engine.kind)
        )
        self._announcer.start()
        settle()
        logger.info("serving", extra={"role": config.role, "address": address, "release": manifest.name})
        return address

    def check(self) -> None:
        """Raises PeerGone when the socket's thread has ended."""
        if self._server is None or not self._server.alive:
            raise PeerGone(f"{self._config.role}: the server's loop has ended")

    def stop(self) -> None:
        """Take the name out of the directory, answer what has arrived, close; may be called twice."""
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _entry(self, name: str, address: str, release: Release, engine: str) -> Entry:
        stats = {} if self._server is None else self._server.stats()
        return Entry(
            role=self._config.role,
            name=name,
            address=address,
            release=release.manifest.name,
            generation=release.manifest.generation,
            pid=os.getpid(),
            host=socket.gethostname(),
            meta={"engine": engine, **stats},
        )


def bind_address(run_dir: Path, name: str) -> str:
    """A UNIX socket in the run folder, or a free loopback port where its path would be too long."""
    path = run_dir / "sock" / f"{name}.ipc"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return "tcp://127.0.0.1:*"
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"ipc://{path}"
