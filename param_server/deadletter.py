"""Letters on their way to the dead-letter topic: kept until the log has acknowledged them.

Blocks nobody. A producer that sends only rubbish must not bury the topic: beyond a rate of letters and of bytes,
letters are counted and left out, and the next one written says how many. Invariant: a letter not left out leaves only
when it is written (or can never be), so whoever keeps positions must not make them durable while `pending` is not 0.
The value of the record is the refused record itself; its key says why, as JSON: `{"reason", "detail", "topic",
"partition", "offset", "skipped"}`.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import Protocol

import msgspec

from infra.clock import Clock
from infra.errors import Permanent, TrirankError
from param_server import metrics
from param_server.updates import Letter

logger = logging.getLogger(__name__)

FULL_AT = 1000
LETTERS_PER_S = 50.0
LETTERS_AT_ONCE = 1000.0
BYTES_PER_S = 4.0 * 1024 * 1024
BYTES_AT_ONCE = 64.0 * 1024 * 1024


class Bucket:
    """Tokens that come back at a rate, up to `most`."""

    def __init__(self, per_s: float, most: float, clock: Clock) -> None:
        self._per_s = per_s
        self._most = most
        self._clock = clock
        self._left = most
        self._filled_s = clock.monotonic_s()

    def has(self, tokens: float) -> bool:
        """Whether so many can be taken; more than `most` can when it is full."""
        now_s = self._clock.monotonic_s()
        self._left = min(self._most, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return self._left >= min(tokens, self._most)

    def take(self, tokens: float) -> None:
        """Take them; the bucket may owe some afterwards."""
        self._left -= tokens


class LogWriter(Protocol):
    """What is needed of `infra.kafka.LogProducer`."""

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, *, wait_s: float = 0.0
    ) -> Future[int]:
        """Accept one record; the future of its offset."""
        ...


class DeadLetters:
    """For one thread. `source` is the topic the letters come from. `muted`: count only, another replica writes them."""

    def __init__(self, log: LogWriter, topic: str, source: str, clock: Clock, *, muted: bool = False) -> None:
        self._muted = muted
        self._log = log
        self._topic = topic
        self._source = source
        self._queue: deque[tuple[Letter, bytes, Future[int] | None]] = deque()
        self._count = 0
        self._letters = Bucket(LETTERS_PER_S, LETTERS_AT_ONCE, clock)
        self._bytes = Bucket(BYTES_PER_S, BYTES_AT_ONCE, clock)
        self._skipped: dict[str, int] = {}
        self._untold = 0

    @property
    def skipped(self) -> dict[str, int]:
        """Letters that were only counted, by reason."""
        return dict(self._skipped)

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
        if self._muted:
            return
        metrics.DEAD_LETTERS.labels(letter.reason).inc()
        self._count += 1
        if self._count & (self._count - 1) == 0:
            # A flood is told of at every power of two; the topic holds each.
            self._tell(letter)
        if not (self._letters.has(1.0) and self._bytes.has(len(letter.value))):
            self._skipped[letter.reason] = self._skipped.get(letter.reason, 0) + 1
            self._untold += 1
            metrics.DEAD_LETTERS_SKIPPED.labels(letter.reason).inc()
            return
        self._letters.take(1.0)
        self._bytes.take(len(letter.value))
        key = self._key(letter)
        self._untold = 0
        self._queue.append((letter, key, self._send(letter, key)))

    def settle(self) -> None:
        """Forget what is acknowledged; send again what failed."""
        for _ in range(len(self._queue)):
            letter, key, future = self._queue.popleft()
            if future is None:
                self._queue.append((letter, key, self._send(letter, key)))
            elif not future.done():
                self._queue.append((letter, key, future))
            elif (error := future.exception()) is None:
                continue
            elif isinstance(error, Permanent):
                logger.error("a dead letter cannot be written", extra={"reason": letter.reason, "error": error})
            else:
                self._queue.append((letter, key, None))

    def _tell(self, letter: Letter) -> None:
        about = {
            "reason": letter.reason,
            "detail": letter.detail,
            "partition": letter.partition,
            "offset": letter.offset,
            "so_far": self._count,
        }
        logger.warning("records go to the dead-letter topic", extra=about)

    def _key(self, letter: Letter) -> bytes:
        about = {
            "reason": letter.reason,
            "detail": letter.detail,
            "topic": self._source,
            "partition": letter.partition,
            "offset": letter.offset,
            "skipped": self._untold,
        }
        return msgspec.json.encode(about)

    def _send(self, letter: Letter, key: bytes) -> Future[int] | None:
        try:
            return self._log.send(self._topic, 0, letter.value, key)
        except TrirankError:
            return None
