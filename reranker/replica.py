"""The reranker as a Ray Serve deployment: Serve starts, checks and replaces it; requests never pass it."""

from __future__ import annotations

from pathlib import Path

from ray import serve

from edge_ranker.rank_server import RankServer, RankServerConfig
from edge_ranker.replica import edge_application
from infra.logs import configure_logging
from infra.settings import Settings

NAME = "rerank"


class RerankReplica:
    """One replica: a RankServer that Serve keeps alive."""

    def __init__(self, config: RankServerConfig) -> None:
        configure_logging(config.log_level)
        self._server = RankServer(config)
        self._server.start()

    def check_health(self) -> None:
        """Raises when the replica has to be replaced."""
        self._server.check()

    def __del__(self) -> None:
        self._server.stop()


def rerank_application(settings: Settings, release_dir: Path, redis_url: str) -> serve.Application:
    """What `serve.run(..., name="rerank", route_prefix=None)` takes."""
    config = RankServerConfig(
        role="rerank",
        release_dir=str(release_dir.resolve()),
        redis_url=redis_url,
        stack=settings.stack,
        run_dir=str(settings.run_dir.resolve()),
        log_level=settings.log_level,
    )
    return serve.deployment(
        RerankReplica,
        name=NAME,
        num_replicas=settings.rerank_replicas,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(config)


def start_rankers(settings: Settings, release_dir: Path, redis_url: str, *, side: str) -> None:
    """Serve both rankers of a release beside another one, as applications named after `side`; returns when they are
    verified, warm and announced. Raises RuntimeError when Serve gives up."""
    applications = {
        f"edge-{side}": edge_application(settings, release_dir, redis_url),
        f"rerank-{side}": rerank_application(settings, release_dir, redis_url),
    }
    serve.run_many([serve.RunTarget(app, name, route_prefix=None) for name, app in applications.items()])


def stop_rankers(side: str) -> None:
    """Take them away, after what they have accepted is answered."""
    for name in (f"edge-{side}", f"rerank-{side}"):
        serve.delete(name)
