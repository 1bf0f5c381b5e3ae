"""One process of a ranking tier: verified engines behind a socket, announced in the directory.

Both tiers are this class with another model. Refuses to serve a release whose recorded requests no engine scores as
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
from edge_ranker.verify import RecordedCheck
from feature_service.schema import schema_of
from infra.directory import Announcer, Entry
from infra.engine.chain import EngineChain
from infra.engine.names import engine_name
from infra.engine.offers import offers_of
from infra.engine.rank import RankHandler
from infra.engine.witness import Witness
from infra.errors import PeerGone, TrirankError
from infra.garbage import settle
from infra.release import Release, Role, read_release
from infra.wire.messages import Hello
from infra.wire.server import WireServer

logger = logging.getLogger(__name__)

MAX_QUEUE = 256
# A run takes milliseconds; one that takes this long will not end.
STUCK_S = 20.0
# Paths of UNIX sockets end at 107 bytes; beyond this the replica listens on loopback instead.
MAX_SOCKET_PATH = 100


@dataclass(frozen=True, slots=True)
class RankServerConfig:
    """What one replica needs; paths are absolute, because Ray starts it somewhere else. `engines` are names in the
    order in which they are tried, none is automatic; `engine_dir` holds the built ones. `max_requests` and `max_rows`
    limit a batch; 0 leaves that to the engine in use."""

    role: Role
    release_dir: str
    redis_url: str
    stack: str
    run_dir: str
    engine_dir: str = ""
    engines: tuple[str, ...] = ()
    max_requests: int = 0
    max_rows: int = 0
    log_level: str = "INFO"


class RankServer:
    """Serves the edge ranker or the reranker of one release."""

    def __init__(self, config: RankServerConfig) -> None:
        self._config = config
        self._server: WireServer | None = None
        self._announcer: Announcer | None = None
        self._engines: EngineChain | None = None
        self._witness = Witness(Path(config.run_dir) / "engines", config.role)

    def start(self) -> str:
        """Load, verify, warm up, listen, announce; the address. Raises ReleaseRefused or ConfigurationError."""
        config = self._config
        release = read_release(Path(config.release_dir), verify_files=False)
        manifest = release.manifest
        schema = schema_of(manifest.schema, manifest.schema_fingerprint)
        engines = self._choose(release, RecordedCheck(config.role, schema, recorded_inputs(release)))
        self._engines = engines
        handler = RankHandler(
            engines,
            manifest.name,
            token_dim=schema.token_dim,
            user_dim=schema.user_dim,
            max_requests=config.max_requests,
            max_rows=config.max_rows,
            role=config.role,
        )
        name = f"{config.role}-{os.getpid()}-{secrets.token_hex(2)}"
        server = WireServer(
            bind=bind_address(Path(config.run_dir), name),
            hello=Hello(config.role, name, manifest.name, manifest.generation, manifest.schema_fingerprint),
            handler=handler,
            max_batch=handler.max_batch,
            max_queue=MAX_QUEUE,
        )
        address = server.start()
        self._server = server
        self._announcer = Announcer(
            config.redis_url, config.stack, lambda: self._entry(name, address, release, engines)
        )
        self._announcer.start()
        settle()
        logger.info(
            "serving",
            extra={"role": config.role, "address": address, "release": manifest.name, "engine": engines.kind},
        )
        return address

    def check(self) -> None:
        """Raises PeerGone when the socket's thread has ended, no engine is left, or one does not come back from a run:
        then only another process helps."""
        if self._server is None or not self._server.alive:
            raise PeerGone(f"{self._config.role}: the server's loop has ended")
        if self._engines is None or not self._engines.able:
            raise PeerGone(f"{self._config.role}: no engine is left")
        if self._engines.running_s() > STUCK_S:
            raise PeerGone(f"{self._config.role}: a run has lasted {self._engines.running_s():.0f} s")

    def stop(self) -> None:
        """Take the name out of the directory, answer what has arrived, close; may be called twice."""
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._engines is not None:
            self._engines.close()
            self._engines = None
        self._witness.forget()

    def _choose(self, release: Release, check: RecordedCheck) -> EngineChain:
        config = self._config
        offers = self._witness.order(offers_of(release, Path(config.engine_dir), config.role, config.engines))
        # What is tried last must not come first by being fast.
        measured = not config.engines and not self._witness.blamed
        engines = EngineChain(config.role, offers, check, measured=measured)
        try:
            engines.start()
        except TrirankError:
            self._witness.forget()
            raise
        self._witness.note(engine_name(engines.kind, engines.precision))
        return engines

    def _entry(self, name: str, address: str, release: Release, engines: EngineChain) -> Entry:
        stats = {} if self._server is None else self._server.stats()
        self._witness.note(engine_name(engines.kind, engines.precision))
        return Entry(
            role=self._config.role,
            name=name,
            address=address,
            release=release.manifest.name,
            generation=release.manifest.generation,
            pid=os.getpid(),
            host=socket.gethostname(),
            meta={**engines.state(), **stats},
        )


def bind_address(run_dir: Path, name: str) -> str:
    """A UNIX socket in the run folder, or a free loopback port where its path would be too long."""
    path = run_dir / "sock" / f"{name}.ipc"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return "tcp://127.0.0.1:*"
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"ipc://{path}"
