"""The rankers as Ray Serve deployments, "edge" and "rerank": Serve starts, checks and replaces their replicas.

Both tiers are one deployment with a role; requests never pass it, they go to the replica's own socket. Refuses nothing:
a replica that cannot serve its release raises, and Serve says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import ray
from ray import serve
from ray.serve.schema import DeploymentStatus

from edge_ranker.rank_server import RankServer, RankServerConfig
from infra.engine.names import on_gpu
from infra.engine.offers import engine_folder
from infra.errors import DoesNotStart
from infra.logs import configure_logging
from infra.release import ROLES, Role
from infra.settings import Settings

# Replicas share a GPU with each other and with the shards; Ray hides it from who asks for none.
GPU_SHARE = 0.05


class RankReplica:
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


def rank_application(role: Role, settings: Settings, release_dir: Path, redis_url: str) -> serve.Application:
    """What `serve.run(..., route_prefix=None)` takes. Ray has to be started."""
    release_dir = release_dir.resolve()
    engines = settings.edge_engines if role == "edge" else settings.rerank_engines
    config = RankServerConfig(
        role=role,
        release_dir=str(release_dir),
        redis_url=redis_url,
        stack=settings.stack,
        run_dir=str(settings.run_dir.resolve()),
        engine_dir=str((settings.engines or engine_folder(release_dir)).resolve()),
        engines=engines,
        max_requests=settings.rank_max_requests,
        max_rows=settings.rank_max_rows,
        log_level=settings.log_level,
    )
    gpu = GPU_SHARE if on_gpu(engines) and ray.cluster_resources().get("GPU", 0) else 0
    return serve.deployment(
        RankReplica,
        name=role,
        num_replicas=settings.edge_replicas if role == "edge" else settings.rerank_replicas,
        ray_actor_options={"num_cpus": 0.1, "num_gpus": gpu},
        health_check_period_s=2.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(config)


def start_rankers(settings: Settings, release_dir: Path, redis_url: str, *, side: str) -> None:
    """Serve both rankers of a release beside another one, as applications named after `side`; returns when they are
    verified, warm and announced. Raises DoesNotStart."""
    run_applications({f"{role}-{side}": rank_application(role, settings, release_dir, redis_url) for role in ROLES})


def run_applications(applications: Mapping[str, serve.Application]) -> None:
    """Start applications of Ray Serve together, by name; returns when all of them run. Raises DoesNotStart with what
    the first one raised that does not."""
    try:
        serve.run_many([serve.RunTarget(app, name, route_prefix=None) for name, app in applications.items()])
    except RuntimeError as error:
        # Serve's own error names no reason; the last lines of the trace it keeps are what the replica raised.
        for name, app in serve.status().applications.items():
            for deployment in app.deployments.values():
                if name in applications and deployment.status == DeploymentStatus.DEPLOY_FAILED:
                    # To the file of Ray's texts where the stack keeps one: whole, for a failure that is a bug.
                    sys.stdout.write(f"{deployment.message}\n")
                    raise DoesNotStart(f"{name} does not start: {_reason(deployment.message)}") from error
        raise


def _reason(trace: str) -> str:
    """What was raised last, without the path of its class."""
    last = next((line for line in reversed(trace.splitlines()) if line.strip()), trace)
    return re.sub(r"^(?:\w+\.)+(?=\w+: )", "", last.strip())


def stop_rankers(side: str) -> None:
    """Take them away, after what they have accepted is answered."""
    for role in ROLES:
        serve.delete(f"{role}-{side}")
