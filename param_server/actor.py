"""Shards as Ray actors: placed, named, restarted by Ray; no request byte passes through it.

An actor does everything in its constructor, so that one that Ray restarts after a crash is whole again by itself: load
snapshot or release, follow the log, serve, announce. Broker and Redis may be away meanwhile. Invariant: the address is
announced only after the shard answers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from infra.directory import Announcer, Entry, read_directory
from infra.errors import ConfigurationError, RedisUnavailable, TrirankError
from infra.garbage import settle
from infra.logs import configure_logging
from infra.release import read_release
from infra.settings import Settings
from param_server.config import ShardConfig
from param_server.eviction import Policy
from param_server.holding import TierRules
from param_server.images import image_folder
from param_server.keeper import Keeping
from param_server.shard import Shard
from param_server.table.device import open_device
from param_server.tiering import Tiering

_READY_TIMEOUT_S = 60.0
# The first start on a GPU compiles its kernels.
_GPU_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 15.0
_WATCH_EVERY_S = 0.5
# Unix sockets end at 107 bytes.
_MOST_SOCKET_PATH = 100


class ShardActor:
    """One shard in its own process. Ray gives it a fresh start when the process ends."""

    def __init__(
        self, settings: Settings, release_path: str, redis_url: str, kafka: str, index: int, side: str, replica: int
    ) -> None:
        configure_logging(settings.log_level)
        # The stack has verified the files when it started.
        release = read_release(Path(release_path), verify_files=False)
        config = _config(settings, redis_url, kafka, index, side, replica)
        device = open_device(settings.shard_device, given=bool(ray.get_gpu_ids()))
        self._stopping = threading.Event()
        self._directory = redis_url, settings.stack
        self._shard = Shard(config, release, device=device)
        self._look_beside()
        entry = Entry(
            role="shard",
            name=config.name,
            address=self._shard.start(),
            release=release.manifest.name,
            generation=release.manifest.generation,
            pid=os.getpid(),
            host=socket.gethostname(),
            meta={"shard": index, "replica": replica, "n_shards": settings.shards, "n_partitions": settings.partitions},
        )
        self._announcer = Announcer(redis_url, settings.stack, lambda: entry)
        self._announcer.start()
        settle()
        threading.Thread(target=self._watch, name="shard-watch", daemon=True).start()

    def pid(self) -> int:
        """Process id; answers once the shard serves."""
        return os.getpid()

    def stop(self) -> None:
        """Leave the directory, finish what has arrived, write a last snapshot."""
        self._stopping.set()
        self._announcer.stop()
        self._shard.stop()

    def _watch(self) -> None:
        """End the process when the shard no longer answers, so that Ray starts another."""
        while not self._stopping.wait(_WATCH_EVERY_S):
            if not self._shard.alive:
                os._exit(70)
            self._look_beside()

    def _look_beside(self) -> None:
        """Tell the shard which generations others serve."""
        with suppress(RedisUnavailable):
            self._shard.beside(
                {entry.generation for entry in read_directory(*self._directory) if entry.role == "shard"}
            )


def start_shards(
    settings: Settings, release_path: Path, redis_url: str, kafka_bootstrap: str, *, side: str = ""
) -> list[Any]:
    """Start every replica of every shard and wait until each serves; the actor handles. Raises ConfigurationError when
    there are not GPUs enough, TrirankError with a shard's reason.

    `side` names the shards of a release that is served beside another; each has processes and snapshots of its own.
    """
    places = [(index, replica) for replica in range(settings.shard_replicas) for index in range(settings.shards)]
    _check_gpus(settings.gpus_per_shard, len(places), float(ray.available_resources().get("GPU", 0.0)))
    remote = ray.remote(ShardActor)
    handles = [
        remote.options(
            name=_name(settings, index, side, replica),
            namespace=settings.stack,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0.1,
            num_gpus=settings.gpus_per_shard,
            # Replicas of a shard should not end with one node.
            scheduling_strategy="SPREAD" if settings.shard_replicas > 1 else "DEFAULT",
        ).remote(settings, str(release_path), redis_url, kafka_bootstrap, index, side, replica)
        for index, replica in places
    ]
    timeout_s = _READY_TIMEOUT_S if settings.shard_device == "cpu" or not settings.gpus_per_shard else _GPU_TIMEOUT_S
    end_s = time.monotonic() + timeout_s
    for (index, replica), handle in zip(places, handles, strict=True):
        who = f"shard {index}" + (f", replica {replica}" if replica else "")
        try:
            ray.get(handle.pid.remote(), timeout=max(0.1, end_s - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise TrirankError(f"{who} does not serve after {timeout_s:.0f} s; see its log") from error
        except ray.exceptions.RayError as error:
            raise TrirankError(f"{who} did not start: {_last_line(error)}") from error
    return handles


def _check_gpus(per_shard: float, n: int, there: float) -> None:
    """Ray would wait for ever for GPUs that do not come. Raises ConfigurationError."""
    if per_shard > 0 and n > int(there) * int(1 / per_shard):
        raise ConfigurationError(
            f"gpus_per_shard: {n} shard processes of {per_shard:g} GPU each do not fit on the {there:g} GPUs that are "
            "free in Ray; lower it, run fewer shards or replicas, or set it to 0"
        )


def stop_shards(handles: Sequence[Any]) -> None:
    """Stop every shard with a last snapshot, and keep Ray from starting it again."""
    stops = [handle.stop.remote() for handle in handles]
    ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _config(settings: Settings, redis_url: str, kafka: str, index: int, side: str, replica: int) -> ShardConfig:
    socket_name = f"shard-{index}" if not side else f"beside-{side}-{index}"
    run_dir = settings.run_dir.resolve()
    return ShardConfig(
        index=index,
        n_shards=settings.shards,
        n_partitions=settings.partitions,
        name=f"{_name(settings, index, side, replica)}-{os.getpid()}",
        bind=_bind(run_dir / "sock", f"r{replica}-{socket_name}" if replica else socket_name),
        snapshot_root=run_dir / "snapshots" / (settings.stack if not side else f"{settings.stack}.{side}"),
        bootstrap=kafka,
        topic=settings.embeddings_topic,
        deadletter_topic=settings.deadletter_topic,
        image_root=image_folder(settings) if settings.table_images else None,
        snapshots=Keeping(settings.snapshot_interval_s, settings.snapshot_keep, settings.snapshot_deltas),
        table_headroom=settings.table_headroom,
        table_min_capacity_rows=settings.table_min_capacity_rows,
        tiers=tiering_of(settings, redis_url),
        replica=replica,
    )


def tiering_of(settings: Settings, redis_url: str) -> Tiering | None:
    """The tiers of a shard with these settings; None where every row is held."""
    if settings.tier_hot_bytes is None:
        return None
    return Tiering(
        hot_bytes=settings.tier_hot_bytes,
        warm_bytes=settings.tier_warm_bytes,
        redis_url=redis_url if settings.tier_cold else None,
        stack=settings.stack,
        rules=TierRules(
            policy=Policy(settings.tier_eviction, settings.tier_half_life_s, settings.tier_ttl_s),
            new_keys=settings.tier_new_keys,
            admission_threshold=settings.tier_admission,
            negative_ttl_s=settings.tier_negative_ttl_s,
            most_leaving=settings.tier_leaving_rows,
        ),
        hot_list_rows=settings.hot_set_rows,
        hot_list_interval_s=settings.hot_set_interval_s,
    )


def _bind(folder: Path, name: str) -> str:
    """A Unix socket nobody used before; a loopback port where the folder's path is too long for one."""
    path = folder / f"{name}-{os.getpid()}.sock"
    if len(os.fsencode(path)) >= _MOST_SOCKET_PATH:
        return "tcp://127.0.0.1:*"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{name}-*.sock"):
        # Ray runs one process per shard: whoever owned these was killed.
        left.unlink(missing_ok=True)
    return f"ipc://{path}"


def _name(settings: Settings, index: int, side: str, replica: int) -> str:
    return f"{settings.stack}-shard-{index}" + (f"-r{replica}" if replica else "") + (f"-{side}" if side else "")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
