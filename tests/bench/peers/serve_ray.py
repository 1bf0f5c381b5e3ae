"""Starts peer (a): Redis, Ray, HAProxy and the application; serves until SIGTERM."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from infra.embedded import EmbeddedRedis
from infra.lifecycle import on_stop_signals
from tests.bench.peers.arguments import parse
from tests.support import free_port

OPTIMISED = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


def environment(directory: Path) -> dict[str, str]:
    """Settings of Ray and HAProxy; must be in force before ray is imported. Ports and files are this run's own."""
    return {
        **OPTIMISED,
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Replicas import this package too.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))),
    }


def run(release: Path, port: int, directory: Path) -> None:
    """Serve until a stop signal."""
    stopped = threading.Event()
    on_stop_signals(stopped.set)
    os.environ.update(environment(directory))
    import ray
    from ray import serve

    from tests.bench.peers.features import PeerFeatures
    from tests.bench.peers.ray_serve import application
    from tests.bench.peers.redis_rows import seed_histories

    store = EmbeddedRedis(directory / "redis")
    try:
        store.start()
        store.wait_ready()
        seed_histories(store.url, PeerFeatures(release))
        ray.init(
            address="local",
            num_cpus=64,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=80 * 1024 * 1024,
            _temp_dir=str(directory / "ray"),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(release, store.url), blocking=False)
        stopped.wait()
    finally:
        ray.shutdown()
        store.stop()


def main() -> None:
    """Entry point."""
    given = parse(__doc__)
    with tempfile.TemporaryDirectory(prefix="bench-ray-", ignore_cleanup_errors=True) as directory:
        run(given.release.resolve(), given.port, Path(directory))


if __name__ == "__main__":
    main()
