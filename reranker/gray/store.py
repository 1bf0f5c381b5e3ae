"""The gray release in Redis: one current release, the split it leads to, the audit log, and who has seen what.

    {stack}:gray            hash: release, split, version, head      {stack}:gray:audit    list of entries
    {stack}:gray:lease      the leader's token, for LEASE_S          {stack}:gray:acks     hash: gateway -> Ack
    {stack}:gray:told:EPOCH hash: gateway -> counts                  {stack}:gray:seen:EPOCH:ARM  bitmap of units
                                                                     {stack}:gray:seen:EPOCH:ARM:items  of items shown

A change is one script: it is made only on top of the version it was decided on, and a leader's only while its lease is
still its own (the token fences it out). Refuses everything else with Conflict. Invariant: version, split, release and
audit log always belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from infra.errors import Retryable
from infra.redis import connect_async, redis_errors
from reranker.gray.audit import GENESIS, Entry, appended
from reranker.gray.measures import Figures
from reranker.gray.split import SplitPlan
from reranker.gray.state import Action, GrayRelease, split_of
from reranker.gray.tally import SEEN, Sample, Seen

LEASE_S = 2.0
KEEP_S = 30 * 86_400  # counts of old epochs
ANSWERS_S = 86_400  # replies kept for the same Idempotency-Key
BEGUN_S = 60  # a change that was begun and never ended, because its gateway died

_COMMIT = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 'version' end
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[2] then return 'lease' end
redis.call('HSET', KEYS[1], 'version', ARGV[3], 'release', ARGV[4], 'split', ARGV[5], 'head', ARGV[6])
redis.call('RPUSH', KEYS[2], ARGV[7])
redis.call('PUBLISH', KEYS[1], ARGV[3])
return 'ok'
"""
_LEASE = """
local owner = redis.call('GET', KEYS[1])
if not owner or owner == ARGV[1] then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) return 1 end
return 0
"""


class Conflict(Retryable):
    """Somebody else changed the release in between, or the lease is another's: read again."""


class Ack(msgspec.Struct, frozen=True):
    """The version of the split one gateway serves by, since when, and what it still answered by an older one.

    `head` is the audit chain's at that version: a Redis that lost its newest change has another.
    """

    version: int
    head: str
    at_us: int
    in_flight: int
    releases: tuple[str, ...]


class Kept(msgspec.Struct, frozen=True):
    """What was asked under an Idempotency-Key, and the reply (JSON); `status` 0: it is not there yet."""

    fingerprint: str
    status: int = 0
    etag: str = ""
    body: str = ""


class Trouble(msgspec.Struct, frozen=True):
    """Why the candidate release of the draft made at `changed_us` cannot be served."""

    changed_us: int
    why: str


@dataclass(frozen=True, slots=True)
class Current:
    """What is in force. Before the first gray release `release` and `split` are None and `version` is 0."""

    version: int
    release: GrayRelease | None
    split: SplitPlan | None
    head: str


class Told(msgspec.Struct, frozen=True):
    """What one gateway has counted, by sample."""

    samples: list[tuple[Sample, Figures]]


class GrayStore:
    """All methods belong to one event loop and raise RedisUnavailable."""

    def __init__(self, redis_url: str, stack: str, base: str) -> None:
        self._base = base
        self._client: Any = connect_async(redis_url)
        self._key = f"{stack}:gray"
        self._pubsub: Any = None

    async def close(self) -> None:
        """Close the connections."""
        if self._pubsub is not None:
            await self._pubsub.aclose()
        await self._client.aclose()

    async def current(self) -> Current:
        """What is in force now; nothing when the stack was started with another release meanwhile."""
        with redis_errors():
            version, raw, split, head = await self._client.hmget(self._key, "version", "release", "split", "head")
        if version is None:
            return Current(0, None, None, GENESIS)
        release = msgspec.json.decode(raw, type=GrayRelease)
        if release.base != self._base:
            return Current(int(version), None, None, head.decode())
        return Current(int(version), release, msgspec.json.decode(split, type=SplitPlan), head.decode())

    async def commit(
        self, on: Current, release: GrayRelease, action: Action, *, who: str, why: str, at_us: int, lease: str = ""
    ) -> Current:
        """Put `release` in force on top of `on`; with `lease` only while that is the leader's. Raises Conflict."""
        version = on.version + 1
        release = msgspec.structs.replace(release, base=self._base)
        if action == "start":
            release = msgspec.structs.replace(release, epoch=version)
        split = split_of(release, version)
        entry = appended(
            on.head,
            Entry(
                seq=version, at_us=at_us, who=who, action=action, why=why, release=release.plan.name,
                version=release.version, state=release.state, step=release.step, split=split, previous="",
            ),
        )  # fmt: skip
        encode = msgspec.json.encode
        keys = (self._key, f"{self._key}:audit", f"{self._key}:lease")
        values = (on.version, lease, version, encode(release), encode(split), entry.digest, encode(entry))
        with redis_errors():
            answer = await self._client.eval(_COMMIT, len(keys), *keys, *values)
        if answer != b"ok":
            what = "the lease is another's" if answer == b"lease" else "the release was changed in between"
            raise Conflict(f"{what}; read it again")
        return Current(version, release, split, entry.digest)

    async def audit(self) -> list[Entry]:
        """Every change so far, oldest first."""
        with redis_errors():
            return [
                msgspec.json.decode(raw, type=Entry) for raw in await self._client.lrange(f"{self._key}:audit", 0, -1)
            ]

    async def begin(self, key: str, fingerprint: str) -> Kept | None:
        """Begin a change with this Idempotency-Key, or find what was begun before with the same key."""
        mine = msgspec.json.encode(Kept(fingerprint))
        with redis_errors():
            if await self._client.set(f"{self._key}:reply:{key}", mine, nx=True, ex=BEGUN_S):
                return None
            raw = await self._client.get(f"{self._key}:reply:{key}")
        # One that was given up this very moment is as good as being made: the caller asks again.
        return Kept(fingerprint) if raw is None else msgspec.json.decode(raw, type=Kept)

    async def keep(self, key: str, reply: Kept) -> None:
        """Keep the reply to a change for a day."""
        with redis_errors():
            await self._client.set(f"{self._key}:reply:{key}", msgspec.json.encode(reply), ex=ANSWERS_S)

    async def give_up(self, key: str) -> None:
        """Nothing was changed: the key may be used again."""
        with redis_errors():
            await self._client.delete(f"{self._key}:reply:{key}")

    async def lead(self, token: str) -> bool:
        """Take or keep the lease; whether it is ours for the next LEASE_S."""
        with redis_errors():
            return bool(await self._client.eval(_LEASE, 1, f"{self._key}:lease", token, int(LEASE_S * 1000)))

    async def acknowledge(self, gateway: str, ack: Ack) -> None:
        """Say which version this gateway serves by."""
        with redis_errors():
            await self._client.hset(f"{self._key}:acks", gateway, msgspec.json.encode(ack))

    async def leave(self, gateway: str) -> None:
        """This gateway serves no longer: nobody has to wait for it."""
        with redis_errors():
            await self._client.hdel(f"{self._key}:acks", gateway)

    async def acks(self) -> dict[str, Ack]:
        """The newest acknowledgement of every gateway there ever was."""
        with redis_errors():
            found = await self._client.hgetall(f"{self._key}:acks")
        return {name.decode(): msgspec.json.decode(raw, type=Ack) for name, raw in found.items()}

    async def tell(
        self, epoch: int, gateway: str, figures: Mapping[Sample, Figures], places: Mapping[Seen, list[int]]
    ) -> None:
        """Replace what this gateway has counted, and add the places of units and items it has seen."""
        told, seen = f"{self._key}:told:{epoch}", f"{self._key}:seen:{epoch}"
        with redis_errors():
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.hset(told, gateway, msgspec.json.encode(Told(list(figures.items()))))
                pipeline.expire(told, KEEP_S)
                for what, found in places.items():
                    for place in found:
                        pipeline.setbit(f"{seen}:{what}", place, 1)
                    pipeline.expire(f"{seen}:{what}", KEEP_S)
                await pipeline.execute()

    async def mark(self, epoch: int, since_us: int, sums: Mapping[Sample, Figures]) -> dict[Sample, Figures]:
        """What had been counted when a step began: the first one to say so is believed; returns what he said."""
        key = f"{self._key}:marks:{epoch}"
        with redis_errors():
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.hsetnx(key, str(since_us), msgspec.json.encode(Told(list(sums.items()))))
                pipeline.expire(key, KEEP_S)
                pipeline.hget(key, str(since_us))
                _, _, raw = await pipeline.execute()
        return dict(msgspec.json.decode(raw, type=Told).samples)

    async def report(self, analysis: bytes) -> None:
        """Keep the newest decision for whoever asks (JSON)."""
        with redis_errors():
            await self._client.hset(self._key, "analysis", analysis)

    async def analysis(self) -> bytes | None:
        """The newest decision."""
        with redis_errors():
            raw: bytes | None = await self._client.hget(self._key, "analysis")
        return raw

    async def trouble(self, release: GrayRelease) -> str | None:
        """Why the candidate release of this draft cannot be served; None while nothing is known against it."""
        with redis_errors():
            raw = await self._client.hget(self._key, "trouble")
        found = msgspec.json.decode(raw, type=Trouble) if raw else None
        return found.why if found is not None and found.changed_us == release.changed_us else None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a change is published, or after `timeout_s`."""
        with redis_errors():
            if self._pubsub is None:
                self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
                await self._pubsub.subscribe(self._key)
            await self._pubsub.get_message(timeout=timeout_s)

    async def told(self, epoch: int) -> dict[Sample, Figures]:
        """What all gateways have counted together; `units` and `items` are set for the compared samples."""
        key = f"{self._key}:told:{epoch}"
        with redis_errors():
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.hvals(key)
                for what in SEEN:
                    pipeline.bitcount(f"{self._key}:seen:{epoch}:{what}")
                raws, *counted = await pipeline.execute()
        sums: dict[Sample, Figures] = {}
        for raw in raws:
            for sample, figures in msgspec.json.decode(raw, type=Told).samples:
                sums[sample] = sums.get(sample, Figures()).plus(figures)
        seen = dict(zip(SEEN, counted, strict=True))
        compared: tuple[tuple[Sample, int, int], ...] = (
            (Sample("candidate", True), seen["candidate"], seen["candidate:items"]),
            (Sample("stable", True), seen["stable"], seen["stable:items"]),
        )
        for sample, units, items in compared:
            sums[sample] = replace(sums.get(sample, Figures()), units=units, items=items)
        return sums
