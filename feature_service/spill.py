"""A log too large for memory, on disk in the order of user, then time: shards of a few thousand users each.

One pass over the Parquet parts writes them; training then reads whole shards, so that everybody's history is complete
in memory while his events are used. Per user and item a few numbers stay in memory, per event nothing does.
Refuses what a log in memory is refused for. Invariant: numbers, times and cuts are those of the same log in memory.

    shard-<n>.spill   records (user i32, item i32, ts_us i64) of users n * 2048 .. (n + 1) * 2048
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_service.dataset import Known, spread_ties
from feature_service.interactions import Interactions
from feature_service.parts import LogParts, Part
from feature_service.timeline import (
    MIN_TRAIN_EVENTS,
    MIN_TRAIN_ITEMS,
    TEST_SHARE,
    VALIDATION_SHARE,
    Occurring,
    too_few_events,
    too_few_items,
)
from infra.errors import InvalidInput

I64 = NDArray[np.int64]

USERS_PER_SHARD = 2048
RECORD = np.dtype([("user", np.int32), ("item", np.int32), ("ts_us", np.int64)])
_BUCKETS = 1 << 16
# So many times are sorted in memory to find a cut among them.
_SORTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards on disk. Small: this is what a worker process is given."""

    folder: Path
    n_users: int
    users_per_shard: int

    @property
    def n(self) -> int:
        """Their number."""
        return -(-self.n_users // self.users_per_shard)

    def users(self, shard: int) -> range:
        """The users of one shard."""
        return range(shard * self.users_per_shard, min((shard + 1) * self.users_per_shard, self.n_users))

    def records(self, shard: int) -> NDArray[np.void]:
        """The records of one shard; none when nobody of it has done anything."""
        file = self.folder / _file(shard)
        return np.fromfile(file, RECORD) if file.exists() else np.empty(0, RECORD)

    def read(self, shards: Sequence[int], before_us: int | None = None) -> Interactions:
        """The interactions of some shards, in ascending order; only those before a moment, when one is given."""
        found = [np.empty(0, RECORD)]
        for shard in sorted(shards):
            records = self.records(shard)
            found.append(records if before_us is None else records[records["ts_us"] < before_us])
        return _interactions(np.concatenate(found), self.n_users)

    def of_users(self, users: I64) -> Interactions:
        """All interactions of some users i64[m]."""
        found = [np.empty(0, RECORD)]
        for shard in np.unique(users // self.users_per_shard).tolist():
            records = self.records(shard)
            found.append(records[np.isin(records["user"], users)])
        return _interactions(np.concatenate(found), self.n_users)


@dataclass(frozen=True, slots=True)
class Spill:
    """A spilled log and its cuts. `shard_events` i64[n_shards]: events before `validation_from_us`, which are trained
    on; `validation_events` and `test_events` i64[n_users]: what each user did in those periods."""

    shards: Shards
    known: Known
    n_events: int
    validation_from_us: int
    test_from_us: int
    first_us: int
    last_us: int
    # What occurs before the validation stretch, and before the test period.
    fitted: Occurring
    trained: Occurring
    shard_events: I64
    validation_events: I64
    test_events: I64


def spill(
    log: LogParts,
    folder: Path,
    *,
    users_per_shard: int = USERS_PER_SHARD,
    on_events: Callable[[int], None] = lambda n: None,
) -> Spill:
    """Write the shards of a log into the new folder `folder`. Raises InvalidInput.

    `on_events` is told how many more events have been read.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in log.read():
        _append(folder, part, users_per_shard)
        on_events(part.user.size)
    known = log.known(log.folder.name)
    shards = Shards(folder, len(known.user_ids), users_per_shard)
    n_events, first_us, last_us = 0, np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for shard in range(shards.n):
        records = _sort(shards, shard)
        if records.size:
            n_events += records.size
            first_us = min(first_us, int(records["ts_us"].min()))
            last_us = max(last_us, int(records["ts_us"].max()))
    if n_events == 0:
        raise InvalidInput(known.name, "no event but impressions; there is nothing to learn from")
    test_from_us = kth_time(shards, int(n_events * (1 - TEST_SHARE)), first_us, last_us)
    n_train = sum(int((shards.records(shard)["ts_us"] < test_from_us).sum()) for shard in range(shards.n))
    if n_train < MIN_TRAIN_EVENTS:
        raise too_few_events(known.name, n_train, n_events, TEST_SHARE)
    validation_from_us = kth_time(shards, int(n_train * (1 - VALIDATION_SHARE)), first_us, last_us)
    return _counted(shards, known, n_events, (first_us, validation_from_us, test_from_us, last_us))


def kth_time(shards: Shards, k: int, first_us: int, last_us: int) -> int:
    """The time with `k` events before it in the order of time, by counting; all lie in `first_us`..`last_us`."""
    low, high = first_us, last_us
    while True:
        width = max(1, -(-(high - low + 1) // _BUCKETS))
        counts = np.zeros(_BUCKETS, np.int64)
        for shard in range(shards.n):
            counts += np.bincount((_times(shards, shard, low, high) - low) // width, minlength=_BUCKETS)
        bucket = int(np.searchsorted(np.cumsum(counts), k, side="right"))
        k -= int(counts[:bucket].sum())
        low, high = low + bucket * width, min(high, low + (bucket + 1) * width - 1)
        if width == 1 or counts[bucket] <= _SORTED:
            here = np.concatenate([_times(shards, shard, low, high) for shard in range(shards.n)])
            return int(np.partition(here, k)[k])


def _counted(shards: Shards, known: Known, n_events: int, moments: tuple[int, int, int, int]) -> Spill:
    first_us, validation_from_us, test_from_us, last_us = moments
    n_users, n_items = len(known.user_ids), len(known.item_ids)
    per_user = {name: np.zeros(n_users, np.int64) for name in ("fitted", "validation", "test")}
    fitted_items, trained_items = np.zeros(n_items, np.int64), np.zeros(n_items, np.int64)
    shard_events = np.zeros(shards.n, np.int64)
    for shard in range(shards.n):
        records = shards.records(shard)
        fitted, trained = records["ts_us"] < validation_from_us, records["ts_us"] < test_from_us
        shard_events[shard] = int(fitted.sum())
        fitted_items += np.bincount(records["item"][fitted], minlength=n_items)
        trained_items += np.bincount(records["item"][trained], minlength=n_items)
        for name, chosen in (("fitted", fitted), ("validation", trained & ~fitted), ("test", ~trained)):
            per_user[name] += np.bincount(records["user"][chosen], minlength=n_users)
    if int((trained_items > 0).sum()) < MIN_TRAIN_ITEMS:
        raise too_few_items(known.name, int((trained_items > 0).sum()))
    return Spill(
        shards=shards,
        known=known,
        n_events=n_events,
        validation_from_us=validation_from_us,
        test_from_us=test_from_us,
        first_us=first_us,
        last_us=last_us,
        fitted=Occurring(fitted_items, per_user["fitted"] > 0),
        trained=Occurring(trained_items, per_user["fitted"] + per_user["validation"] > 0),
        shard_events=shard_events,
        validation_events=per_user["validation"],
        test_events=per_user["test"],
    )


def _append(folder: Path, part: Part, users_per_shard: int) -> None:
    """Add a part to the shards of its users, in its order."""
    shards = part.user // users_per_shard
    order = np.argsort(shards, kind="stable")
    records = np.empty(order.size, RECORD)
    for name, column in (("user", part.user), ("item", part.item), ("ts_us", part.ts_us)):
        records[name] = column[order]
    numbers, begins = np.unique(shards[order], return_index=True)
    ends = [*begins[1:].tolist(), order.size]
    for shard, begin, end in zip(numbers.tolist(), begins.tolist(), ends[: numbers.size], strict=True):
        with (folder / _file(shard)).open("ab") as file:
            file.write(records[begin:end].tobytes())


def _sort(shards: Shards, shard: int) -> NDArray[np.void]:
    """Bring one shard into the order of user, then time."""
    records = shards.records(shard)
    records = records[np.lexsort((records["ts_us"], records["user"]))]
    begins = np.flatnonzero(np.diff(records["user"], prepend=-1, append=-1)) if records.size else np.zeros(1, np.int64)
    records["ts_us"] = spread_ties(np.ascontiguousarray(records["ts_us"]), begins)
    records.tofile(shards.folder / _file(shard))
    return records


def _interactions(records: NDArray[np.void], n_users: int) -> Interactions:
    user = np.ascontiguousarray(records["user"])
    first = np.zeros(n_users + 1, np.int64)
    np.cumsum(np.bincount(user, minlength=n_users), out=first[1:])
    return Interactions(user, np.ascontiguousarray(records["item"]), np.ascontiguousarray(records["ts_us"]), first)


def _file(shard: int) -> str:
    return f"shard-{shard:06d}.spill"


def _times(shards: Shards, shard: int, low: int, high: int) -> I64:
    """The times of a shard within bounds."""
    times = shards.records(shard)["ts_us"]
    return np.asarray(times[(times >= low) & (times <= high)])
