"""The feedback loop as a Ray actor: placed, named, restarted by Ray.

Everything happens in the constructor, so that an actor Ray restarts after a crash is whole again by itself; where it
goes on is in Redis. Broker and Redis may be away meanwhile. Invariant: announced means that the loop runs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from feature_service.events import FeedbackLoop
from feature_service.schema import FeatureSchema
from feature_service.store import HistoryWriter
from infra.directory import Announcer, Entry, read_directory
from infra.errors import TrirankError
from infra.kafka import LogConsumer, LogProducer
from infra.logs import configure_logging
from infra.settings import Settings

ROLE = "events"
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_WATCH_EVERY_S = 0.5
_ASK_EVERY_S = 0.02
# Every fetch costs about a millisecond here and in the broker; a history is new enough after this.
_HOLD_MS = 60


class EventsActor:
    """The one reader of the feedback topic."""

    def __init__(self, settings: Settings, schema: FeatureSchema, redis_url: str, kafka: str) -> None:
        configure_logging(settings.log_level)
        self._name = _name(settings)
        self._stopping = threading.Event()
        self._histories = HistoryWriter(redis_url, settings.stack, schema)
        self._letters = LogProducer(kafka, delivery_timeout_s=5.0)

        def open_reader(positions: Mapping[int, int], identity: str | None) -> LogConsumer:
            partitions = range(settings.partitions)
            return LogConsumer(
                kafka, settings.feedback_topic, partitions, positions=positions, identity=identity, hold_ms=_HOLD_MS
            )

        self._loop = FeedbackLoop(
            self._histories,
            open_reader,
            self._letters,
            schema,
            topic=settings.feedback_topic,
            deadletter_topic=settings.deadletter_topic,
        )
        self._letters.start()
        self._loop.start()
        self._announcer = Announcer(redis_url, settings.stack, self._entry)
        self._announcer.start()
        threading.Thread(target=self._watch, name="events-watch", daemon=True).start()

    def pid(self) -> int:
        """Process id; answers once the loop runs."""
        return os.getpid()

    def stop(self) -> None:
        """Leave the directory, finish the batch at hand, close everything."""
        self._stopping.set()
        self._announcer.stop()
        self._loop.stop()
        self._letters.close()
        self._histories.close()

    def _entry(self) -> Entry:
        return Entry(
            role=ROLE,
            name=self._name,
            address="",
            release="",
            generation=0,
            pid=os.getpid(),
            host=socket.gethostname(),
            meta=self._loop.health(),
        )

    def _watch(self) -> None:
        """End the process when the loop has ended, so that Ray starts another."""
        while not self._stopping.wait(_WATCH_EVERY_S):
            if not self._loop.alive:
                os._exit(70)


def start_events(settings: Settings, schema: FeatureSchema, redis_url: str, kafka_bootstrap: str) -> Any:
    """Start the actor and wait until the directory has it; its handle. Raises TrirankError with the reason."""
    handle = (
        ray.remote(EventsActor)
        .options(
            name=_name(settings),
            namespace=settings.stack,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0.1,
        )
        .remote(settings, schema, redis_url, kafka_bootstrap)
    )
    end_s = time.monotonic() + _READY_TIMEOUT_S
    try:
        pid = ray.get(handle.pid.remote(), timeout=_READY_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise TrirankError(f"the events actor did not start: {str(error).strip().splitlines()[-1]}") from error
    while not any(e.role == ROLE and e.pid == pid for e in read_directory(redis_url, settings.stack)):
        if time.monotonic() > end_s:
            raise TrirankError(f"the events actor is not in the directory after {_READY_TIMEOUT_S:.0f} s; see its log")
        time.sleep(_ASK_EVERY_S)
    return handle


def stop_events(handle: Any) -> None:
    """Stop the actor in order, and keep Ray from starting it again."""
    ray.wait([handle.stop.remote()], timeout=_STOP_TIMEOUT_S)
    ray.kill(handle, no_restart=True)


def _name(settings: Settings) -> str:
    return f"{settings.stack}-{ROLE}"
