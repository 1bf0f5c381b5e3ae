"""Who serves where: every process writes its own entry into Redis again and again, everybody else reads.

One hash `{stack}:directory`: `role/name` -> `time of Redis in ms|entry as JSON`; no JSON means that it has left.
Refuses to forget because Redis did: a reader keeps what it knew while Redis is away, and gives everybody time to write
again when it is back, even empty. Invariant: an entry goes when it says so, or when it was not written for 3 s while
Redis answered.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from infra.errors import RedisUnavailable
from infra.metrics import counter
from infra.redis import connect, connect_async, redis_errors

_log = logging.getLogger(__name__)
GONE_AFTER_S = 3.0
ANNOUNCE_INTERVAL_S = 1.0
READ_INTERVAL_S = 0.5
_JOIN_S = 10.0

# One clock for all: that of Redis. Entries of processes that died without a word are swept after a minute.
_ANNOUNCE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now) .. '|' .. ARGV[2])
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local ms = tonumber(string.match(all[i + 1], '^%d+'))
  if not ms or now - ms > 60000 then redis.call('HDEL', KEYS[1], all[i]) end
end
return 1
"""
# Only what we wrote ourselves: a successor of the same name may have written since.
_LEAVE = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value and string.match(value, '^%d+|(.*)$') == ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], string.match(value, '^%d+') .. '|')
end
return 1
"""

_FAILURES = counter(
    "directory_failures_total",
    "Announcements (write) and looks (read) that failed. Growing: Redis is away or slow; calls go on with the peers "
    "that are known, but new ones are not found until it is back.",
    ("what",),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One serving process. Roles: shard, edge, rerank, gateway, events."""

    role: str
    name: str
    address: str
    release: str
    generation: int
    pid: int
    host: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """What one look found under one name; `entry` None says that it has left."""

    age_s: float
    entry: Entry | None


class Announcer:
    """Writes the entry of this process every `interval_s`, from a thread of its own."""

    def __init__(
        self,
        redis_url: str,
        stack: str,
        make_entry: Callable[[], Entry],
        interval_s: float = ANNOUNCE_INTERVAL_S,
    ) -> None:
        self._redis_url = redis_url
        self._key = _key(stack)
        self._make_entry = make_entry
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._announced: tuple[str, bytes] | None = None
        self._reached = True

    def start(self) -> None:
        """Begin; the first entry is written at once."""
        self._thread.start()

    def stop(self) -> None:
        """Say that this process has left, and end. Harmless when Redis is away or start() was never called."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with connect(self._redis_url) as client:
            while not self._stopping.is_set():
                self._guarded(lambda: self._announce(client))
                self._stopping.wait(self._interval_s)
            if self._announced is not None:
                name, value = self._announced
                self._guarded(lambda: client.eval(_LEAVE, 1, self._key, name, value))

    def _announce(self, client: Any) -> None:
        entry = self._make_entry()
        name, value = f"{entry.role}/{entry.name}", msgspec.json.encode(entry)
        client.eval(_ANNOUNCE, 1, self._key, name, value)
        self._announced = name, value

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            with redis_errors():
                step()
        except RedisUnavailable as error:
            if self._reached:
                _log.warning("not announced; trying again", extra={"reason": str(error)})
        except Exception:  # noqa: BLE001 - the outermost loop
            _log.exception("the entry of this process could not be made")
        else:
            self._reached = True
            return
        self._reached = False
        _FAILURES.labels("write").inc()


class DirectoryReader:
    """Reads the directory of one stack; all methods belong to one event loop."""

    def __init__(self, redis_url: str, stack: str, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._client = connect_async(redis_url)
        self._key = _key(stack)
        self._clock_s = clock_s
        self._known: dict[str, tuple[Entry, float]] = {}
        self._reached = True
        self._away = False
        self._back_s = float("-inf")

    async def read(self) -> list[Entry]:
        """The entries now, by role and name. Raises RedisUnavailable."""
        try:
            with redis_errors():
                async with self._client.pipeline(transaction=False) as pipeline:
                    pipeline.time()
                    pipeline.hgetall(self._key)
                    now, fields = await pipeline.execute()
        except RedisUnavailable:
            self._away = True
            raise
        return self.merge(_records(now, fields))

    def merge(self, records: Mapping[str, Record]) -> list[Entry]:
        """Take in what one look found; returns the entries that count now."""
        now_s = self._clock_s()
        if self._away:
            self._away, self._back_s = False, now_s
        for name, record in records.items():
            if record.entry is None:
                self._known.pop(name, None)
            elif record.age_s <= GONE_AFTER_S or name in self._known:
                self._known[name] = record.entry, now_s - record.age_s
        for name, (_, seen_s) in list(self._known.items()):
            if now_s - max(seen_s, self._back_s) > GONE_AFTER_S:
                del self._known[name]
        return _ordered(entry for entry, _ in self._known.values())

    async def watch(self, on_entries: Callable[[list[Entry]], None], interval_s: float = READ_INTERVAL_S) -> None:
        """Call `on_entries` with the first look and after every change, until cancelled; then close.

        Goes on while Redis is away; an `on_entries` that failed is called again after the next look.
        """
        try:
            last: list[Entry] | None = None
            while True:
                last = await self._look(on_entries, last)
                await asyncio.sleep(interval_s)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection to Redis."""
        await self._client.aclose()

    async def _look(self, on_entries: Callable[[list[Entry]], None], last: list[Entry] | None) -> list[Entry] | None:
        try:
            entries = await self.read()
            if entries != last:
                on_entries(entries)
        except RedisUnavailable as error:
            self._failed(error)
            return last
        except Exception:  # noqa: BLE001 - the outermost loop
            _log.exception("the directory could not be used")
            _FAILURES.labels("read").inc()
            return last
        self._reached = True
        return entries

    def _failed(self, error: RedisUnavailable) -> None:
        _FAILURES.labels("read").inc()
        if self._reached:
            _log.warning("the directory cannot be read; keeping what is known", extra={"reason": str(error)})
        self._reached = False


def read_directory(redis_url: str, stack: str) -> list[Entry]:
    """The entries written within the last 3 s, by role and name. Raises RedisUnavailable."""
    with redis_errors(), connect(redis_url) as client, client.pipeline(transaction=False) as pipeline:
        pipeline.time()
        pipeline.hgetall(_key(stack))
        now, fields = pipeline.execute()
    records = _records(now, fields).values()
    return _ordered(r.entry for r in records if r.entry is not None and r.age_s <= GONE_AFTER_S)


def _key(stack: str) -> str:
    return f"{stack}:directory"


def _records(now: tuple[int, int], fields: Mapping[bytes, bytes]) -> dict[str, Record]:
    """What the hash says, with ages by the clock of Redis. What cannot be read is not ours and is passed over."""
    now_ms = now[0] * 1000 + now[1] // 1000
    records: dict[str, Record] = {}
    for name, value in fields.items():
        written_ms, _, text = value.partition(b"|")
        try:
            age_s = max(0, now_ms - int(written_ms)) / 1000
            entry = msgspec.json.decode(text, type=Entry) if text else None
        except (ValueError, msgspec.MsgspecError):
            _log.warning("an entry of the directory is not readable", extra={"entry": name.decode(errors="replace")})
            continue
        records[name.decode(errors="replace")] = Record(age_s, entry)
    return records


def _ordered(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.role, entry.name))
