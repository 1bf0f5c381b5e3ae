"""Letters on their way to the dead-letter topic: kept until the log has acknowledged them.

Blocks nobody. Invariant: a letter leaves only when it is written (or can never be), so whoever keeps positions must not
make them durable while `pending` is not 0. The value of the record is the refused record itself; its key says why, as
JSON: `{"reason", "detail", "topic", "partition", "offset"}`.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import Protocol

import msgspec

from infra.errors import Permanent, TrirankError
from param_server import metrics
from param_server.updates import Letter

logger = logging.getLogger(__name__)

FULL_AT = 1000


class LogWriter(Protocol):
    """What is needed of `infra.kafka.LogProducer`."""

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        """Accept one record; the future of its offset."""
        ...


class DeadLetters:
    """For one thread. `source` is the topic the letters come from."""

    def __init__(self, log: LogWriter, topic: str, source: str) -> None:
        self._log = log
        self._topic = topic
        self._source = source
        self._queue: deque[tuple[Letter, Future[int] | None]] = deque()
        self._count = 0

    @property
    def pending(self) -> int:
        """Letters not acknowledged yet."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the stream should wait."""
        return self.pending >= FULL_AT

    def put(self, letter: Letter) -> None:
        """Accept one letter and hand it to the log."""
        metrics.DEAD_LETTERS.labels(letter.reason).inc()
        self._count += 1
        if self._count & (self._count - 1) == 0:
            # A flood is told of at every power of two; the topic holds each.
            self._tell(letter)
        self._queue.append((letter, self._send(letter)))

    def settle(self) -> None:
        """Forget what is acknowledged; send again what failed."""
        for _ in range(len(self._queue)):
            letter, future = self._queue.popleft()
            if future is None:
                self._queue.append((letter, self._send(letter)))
            elif not future.done():
                self._queue.append((letter, future))
            elif (error := future.exception()) is None:
                continue
            elif isinstance(error, Permanent):
                logger.error("a dead letter cannot be written", extra={"reason": letter.reason, "error": error})
            else:
                self._queue.append((letter, None))

    def _tell(self, letter: Letter) -> None:
        about = {
            "reason": letter.reason,
            "detail": letter.detail,
            "partition": letter.partition,
            "offset": letter.offset,
            "so_far": self._count,
        }
        logger.warning("records go to the dead-letter topic", extra=about)

    def _send(self, letter: Letter) -> Future[int] | None:
        about = {
            "reason": letter.reason,
            "detail": letter.detail,
            "topic": self._source,
            "partition": letter.partition,
            "offset": letter.offset,
        }
        try:
            return self._log.send(self._topic, 0, letter.value, msgspec.json.encode(about))
        except TrirankError:
            return None
