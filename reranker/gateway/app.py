"""The gateway as a Ray Serve deployment: Serve starts, checks and replaces it; HTTP goes straight to its own socket.

Serve's HTTP proxy has no part in it. Every gateway process listens on the same port (SO_REUSEPORT), so one that dies
takes down only the requests it holds.
"""

from __future__ import annotations

from pathlib import Path

from ray import serve

from infra.logs import configure_logging
from infra.redis import shared_secret
from infra.settings import Settings
from infra.state import control_token
from reranker.gateway.config import GatewayConfig
from reranker.gateway.http import opened_app
from reranker.gateway.server import GatewayServer

NAME = "gateway"


class Gateway:
    """One gateway process: a GatewayServer that Serve keeps alive."""

    def __init__(self, config: GatewayConfig) -> None:
        configure_logging(config.log_level)
        self._server = GatewayServer(config.host, config.port, lambda: opened_app(config))
        self._server.start()

    def check_health(self) -> None:
        """Raises when the gateway has to be replaced."""
        self._server.check()

    def __del__(self) -> None:
        self._server.stop()


def gateway_application(
    settings: Settings,
    release_dir: Path,
    redis_url: str,
    kafka: str,
    *,
    embedded_redis: bool,
    embedded_kafka: bool,
) -> serve.Application:
    """What `serve.run(..., name="gateway", route_prefix=None)` takes."""
    config = GatewayConfig(
        host=settings.host,
        port=settings.port,
        release_dir=str(release_dir.resolve()),
        stack=settings.stack,
        redis_url=redis_url,
        kafka=kafka,
        embedded_redis=embedded_redis,
        embedded_kafka=embedded_kafka,
        feedback_topic=settings.feedback_topic,
        shards=settings.shards,
        partitions=settings.partitions,
        recall_k=settings.recall_k,
        rerank_depth=settings.rerank_depth,
        deadline_ms=settings.deadline_ms,
        max_in_flight=settings.max_in_flight,
        gray_lease_s=settings.gray_lease_s,
        log_level=settings.log_level,
        attribution_key=shared_secret(redis_url, f"{settings.stack}:attribution_key"),
        control_token=control_token(settings),
    )
    return serve.deployment(
        Gateway,
        name=NAME,
        num_replicas=settings.gateways,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(config)
