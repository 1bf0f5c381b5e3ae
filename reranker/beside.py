"""Replicas and shards of the releases a gray release needs beside the one the stack was started with.

Runs in the stack's own process and follows the gray release in Redis: a draft brings its candidate release up, a
promotion keeps both, an aborted one is taken away a minute later, when no gateway asks it any more. Refuses nothing by
itself: a release that cannot be served is logged, and is not started again until another draft is made. Invariant: what
was started here is stopped by `stop`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edge_ranker.replica import start_rankers, stop_rankers
from infra.clock import Clock, SystemClock
from infra.errors import RedisUnavailable
from infra.metrics import counter
from infra.redis import connect, redis_errors
from infra.release import read_release
from infra.settings import Settings
from param_server.actor import start_shards, stop_shards
from param_server.retire import tidy
from reranker.gray.state import GrayRelease, wanted
from reranker.gray.store import Trouble

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
_JOIN_S = 90.0
_FAILURES = counter(
    "beside_failures_total",
    "What went wrong with releases beside the first one. redis: it is away, what runs goes on. start: a release cannot "
    "be served, `trirank release` says why. look: a bug, the log of `trirank up` has the trace.",
    ("what",),
)


class Beside:
    """Keeps what runs beside `base` what the gray release needs."""

    def __init__(self, settings: Settings, base: str, redis_url: str, kafka: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._base = base
        self._redis_url = redis_url
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self._running: dict[str, Callable[[], None]] = {}
        self._failed: set[tuple[str, int]] = set()
        self._tidy = False

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Follow no longer, and stop everything that was started."""
        self._stopping.set()
        self._thread.join(_JOIN_S)
        for name in list(self._running):
            self._running.pop(name)()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self._look()
            except RedisUnavailable:
                _FAILURES.labels("redis").inc()  # what runs goes on running
            except Exception:  # the outermost loop
                _FAILURES.labels("look").inc()
                logger.exception("releases beside the first one could not be looked after")

    def _look(self) -> None:
        release = _current(self._redis_url, self._settings.stack, self._base)
        needed = wanted(release, self._base, self._clock.now_us())
        for name in set(self._running) - set(needed):
            self._running.pop(name)()
            logger.info("a release is no longer served", extra={"release": name})
        epoch = release.changed_us if release is not None and release.state == "draft" else 0
        for name, path in needed.items():
            if name not in self._running and (name, epoch) not in self._failed:
                self._bring_up(name, Path(path), epoch)
        if not self._tidy:
            self._tidy = self._drop_unserved(needed)

    def _bring_up(self, name: str, path: Path, epoch: int) -> None:
        try:
            side = f"{read_release(path).manifest.generation:08x}"
            shards: list[Any] = start_shards(self._settings, path, self._redis_url, self._kafka, side=side)
            self._running[name] = lambda: _take_away(side, shards)
            start_rankers(self._settings, path, self._redis_url, side=side)
        except Exception as error:  # as many kinds as Ray has; what was started is taken away again
            _FAILURES.labels("start").inc()
            logger.exception("a release cannot be served", extra={"release": name})
            self._failed.add((name, epoch))
            self._running.pop(name, lambda: None)()
            self._tell(Trouble(epoch, _last_line(error)))
            return
        self._tidy = False
        logger.info("a release is served beside the first one", extra={"release": name})

    def _drop_unserved(self, needed: Mapping[str, str]) -> bool:
        """At the start, and when another release came: what was taken away can be drafted again until then."""
        if self._settings.release is not None:
            tidy(self._settings, self._redis_url, [self._settings.release, *(Path(path) for path in needed.values())])
        return True

    def _tell(self, trouble: Trouble) -> None:
        """Let the operator who waits for the draft know."""
        with redis_errors(), connect(self._redis_url) as client:
            client.hset(f"{self._settings.stack}:gray", "trouble", msgspec.json.encode(trouble))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def _take_away(side: str, shards: list[Any]) -> None:
    stop_rankers(side)
    stop_shards(shards)


def _current(redis_url: str, stack: str, base: str) -> GrayRelease | None:
    with redis_errors(), connect(redis_url) as client:
        raw: Any = client.hget(f"{stack}:gray", "release")
    release = None if raw is None else msgspec.json.decode(raw, type=GrayRelease)
    return release if release is not None and release.base == base else None
