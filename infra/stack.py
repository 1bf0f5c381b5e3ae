"""The wiring of a stack on one machine: what starts, in which order, on Ray; and how it stops.

Order: checks that need no process, Redis and the broker, topics, Ray, then every tier at once; ready when a gateway
says so. The supervisor restarts the embedded Redis and broker; Ray restarts actors and replicas. Stopping goes the
other way round. Nothing here touches a request.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from infra.embedded import EmbeddedBroker, EmbeddedRedis
from infra.errors import ConfigurationError, LogUnavailable, RedisUnavailable, TrirankError
from infra.lifecycle import on_stop_signals
from infra.metrics import join_folder
from infra.preflight import lock_run_dir, refuse_missing_gpu, refuse_taken_port
from infra.release import Release, read_release
from infra.settings import Settings
from infra.state import StackState, state_path, write_state

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
# Ray's own name for the folder of its files.
RAY_DIR = "RAY_TMPDIR"
SUPERVISE_EVERY_S = 0.2


class Stack:
    """One running stack. `start()` returns when it answers requests; `stop()` leaves nothing running."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._redis: EmbeddedRedis | None = None
        self._broker: EmbeddedBroker | None = None
        self._state: StackState | None = None
        self._lock: IO[str] | None = None

    def start(self) -> StackState:
        """Start everything; raises a TrirankError that says what to do when something is in the way."""
        settings = self._settings
        release = self._check()
        redis_url, kafka = self._start_stores()
        self._state = StackState(
            guard_pid=os.getppid(),
            supervisor_pid=os.getpid(),
            url=f"http://{_shown_host(settings.host)}:{settings.port}",
            redis=redis_url,
            kafka=kafka,
            redis_pid=None,
            kafka_pid=None,
            release=str(release.path),
            stack=settings.stack,
            shards=settings.shards,
            partitions=settings.partitions,
        )
        self._write_state()
        self._undo.append(("state", lambda: state_path(settings).unlink(missing_ok=True)))
        self._start_ray()
        self._start_tiers(release, redis_url, kafka)
        self._wait_ready(self._state.url)
        return self._state

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping.is_set()

    def supervise(self) -> None:
        """Restart embedded servers that die, until `request_stop`."""
        while not self._stopping.wait(SUPERVISE_EVERY_S):
            for server in self._embedded():
                if not server.alive():
                    self._revive(server)

    def request_stop(self) -> None:
        """Make `supervise` return; safe in a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Undo what was started, last first; every step is tried."""
        while self._undo:
            name, undo = self._undo.pop()
            try:
                undo()
            except (TrirankError, OSError, RuntimeError):
                logger.exception("stopping failed", extra={"part": name})

    # --- checks ----------------------------------------------------------------------------------------------------

    def _check(self) -> Release:
        settings = self._settings
        if settings.release is None:
            raise ConfigurationError("release: no release directory is named; `trirank train` makes one")
        release = read_release(settings.release.resolve())
        _refuse_foreign_schema(release)
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock_run_dir(settings)
        self._undo.append(("lock", self._lock.close))
        refuse_missing_gpu(settings.shard_device)
        refuse_taken_port(settings.host, settings.port)
        # Sockets and notes of processes of an earlier stack; nobody listens there any more.
        for left in ("sock", "engines"):
            shutil.rmtree(settings.run_dir / left, ignore_errors=True)
        return release

    # --- Redis and the broker --------------------------------------------------------------------------------------

    def _start_stores(self) -> tuple[str, str]:
        from infra.kafka import ensure_topics, probe
        from infra.redis import ping

        settings = self._settings
        topics = {
            settings.embeddings_topic: settings.partitions,
            settings.feedback_topic: settings.partitions,
            settings.deadletter_topic: 1,
        }
        if settings.redis is None:
            self._redis = EmbeddedRedis(settings.home / "redis")
            self._own("redis", self._redis)
            redis_url = self._redis.url
        else:
            redis_url = settings.redis
        if settings.kafka is None:
            self._broker = EmbeddedBroker(settings.run_dir / "broker", topics=topics)
            self._own("broker", self._broker)
            kafka = self._broker.bootstrap
        else:
            kafka = settings.kafka
        for server in self._embedded():
            server.wait_ready(10.0)
        try:
            ping(redis_url)
        except RedisUnavailable as error:
            raise ConfigurationError(
                f"redis: {redis_url} does not answer ({error}); start it or leave --redis out"
            ) from error
        try:
            probe(kafka, 3.0)
        except LogUnavailable as error:
            raise ConfigurationError(
                f"kafka: {kafka} does not answer ({error}); start it or leave --kafka out"
            ) from error
        ensure_topics(kafka, topics)
        return redis_url, kafka

    def _own(self, name: str, server: EmbeddedRedis | EmbeddedBroker) -> None:
        server.start()
        self._undo.append((name, server.stop))

    def _write_state(self) -> None:
        if self._state is None:
            return
        self._state = replace(
            self._state,
            redis_pid=self._redis.pid if self._redis else None,
            kafka_pid=self._broker.pid if self._broker else None,
        )
        write_state(self._settings, self._state)

    def _embedded(self) -> list[EmbeddedRedis | EmbeddedBroker]:
        return [server for server in (self._redis, self._broker) if server is not None]

    def _revive(self, server: EmbeddedRedis | EmbeddedBroker) -> None:
        logger.warning("an embedded server died and is restarted", extra={"server": type(server).__name__})
        try:
            server.restart()
            self._write_state()
        except TrirankError:
            logger.exception("restart failed; trying again", extra={"server": type(server).__name__})

    # --- Ray and the tiers -----------------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        settings = self._settings
        metrics_dir = settings.run_dir / "metrics"
        shutil.rmtree(metrics_dir, ignore_errors=True)
        metrics_dir.mkdir(parents=True)
        join_folder(metrics_dir.resolve())
        # Made, and taken away whatever way this process ends, by the one that guards it.
        ray_dir = Path(os.environ[RAY_DIR])
        os.environ.update(
            {
                # Loopback only, a token of this run, and no usage statistics.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                # One computing thread per process: the tiers are the parallelism of a small machine.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "RAY_SERVE_LOG_TO_STDERR": "0",
                # The controller looks at every replica this often; ten times a second is its default.
                "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
                # Gateways bring their own sockets. With Serve's ingress, which RAY_SERVE_ENABLE_HA_PROXY and
                # RAY_SERVE_THROUGHPUT_OPTIMIZED turn on, each would be drained for half a minute when it ends.
                "RAY_SERVE_ENABLE_HA_PROXY": "0",
                "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            }
        )
        import ray
        from ray import serve

        ray.init(
            address="local",
            namespace=settings.stack,
            num_cpus=64,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=80 * 1024 * 1024,
            _temp_dir=str(ray_dir),
        )
        self._undo.append(("ray", ray.shutdown))
        # Ray takes SIGTERM for itself when it starts; the stack wants to stop in order.
        on_stop_signals(self.request_stop)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")

    def _start_tiers(self, release: Release, redis_url: str, kafka: str) -> None:
        """Everything at once: each tier waits for what it needs and says so in `/readyz`."""
        from ray import serve

        from edge_ranker.replica import rank_application, run_applications
        from feature_service.actor import start_events, stop_events
        from feature_service.schema import schema_of
        from feature_service.store import HistoryWriter
        from param_server.actor import start_shards, stop_shards
        from reranker.beside import Beside
        from reranker.gateway.app import gateway_application

        settings = self._settings
        schema = schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
        writer = HistoryWriter(redis_url, settings.stack, schema)
        writer.seed(release.users())
        writer.close()
        embedded = {"embedded_redis": settings.redis is None, "embedded_kafka": settings.kafka is None}
        gateway = gateway_application(settings, release.path, redis_url, kafka, **embedded)
        applications = {
            "edge": rank_application("edge", settings, release.path, redis_url),
            "rerank": rank_application("rerank", settings, release.path, redis_url),
            "gateway": gateway,
        }
        with ThreadPoolExecutor(max_workers=2) as starters:
            shards = starters.submit(start_shards, settings, release.path, redis_url, kafka)
            events = starters.submit(start_events, settings, schema, redis_url, kafka)
            self._undo.extend((name, partial(serve.delete, name)) for name in applications)
            run_applications(applications)
            self._undo.append(("shards", partial(stop_shards, shards.result())))
            self._undo.append(("events", partial(stop_events, events.result())))
        beside = Beside(settings, release.manifest.name, redis_url, kafka)
        beside.start()
        self._undo.append(("releases beside", beside.stop))

    def _wait_ready(self, url: str) -> None:
        end = time.monotonic() + READY_TIMEOUT_S
        answer = "no gateway answers"
        while time.monotonic() < end and not self._stopping.is_set():
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=2):
                    return
            except urllib.error.HTTPError as error:
                answer = error.read(2000).decode(errors="replace")
            except OSError as error:
                answer = str(error)
            self._stopping.wait(0.1)
        if self._stopping.is_set():
            raise TrirankError("stopped before it was ready")
        raise TrirankError(f"not ready after {READY_TIMEOUT_S:.0f} s: {answer}; logs are in {self._settings.run_dir}")


def _refuse_foreign_schema(release: Release) -> None:
    from feature_service.schema import schema_of

    schema_of(release.manifest.schema, release.manifest.schema_fingerprint)


def _shown_host(host: str) -> str:
    return "localhost" if host in ("127.0.0.1", "0.0.0.0") else host
