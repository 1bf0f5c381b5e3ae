"""What one gateway has counted for the gray release that runs: four samples, each a set of growing counts.

Counts only the newest epoch: an event that belongs to an earlier gray release, or to none, changes nothing. Requests
whose arm was forced by a list or a header are not in any sample. Distinct units are counted by their buckets, which all
gateways share; each new one is told once. Belongs to one event loop. Invariant: counts of an epoch never fall.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from reranker.gray.attribution import Attribution
from reranker.gray.measures import Figures, bucket_of_ms
from reranker.gray.split import PPM, Arm, Assignment

ARMS: tuple[Arm, Arm] = ("stable", "candidate")
# Kinds of events one sample tells apart; further ones are not counted.
MAX_EVENT_NAMES = 64


class Sample(NamedTuple):
    """Which requests are counted together."""

    arm: Arm
    compared: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one answered request adds."""

    took_ms: float
    failed: bool
    late: bool
    degraded: bool
    candidates: int
    missing_rows: int
    cold: bool
    shown: int


@dataclass(slots=True)
class _Counts:
    plain: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    latency: Counter[int] = field(default_factory=Counter)


class Tally:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.epoch = 0
        self._counts: dict[Sample, _Counts] = {}
        self._seen: dict[Arm, bytearray] = {arm: bytearray() for arm in ARMS}
        self._new: dict[Arm, list[int]] = {arm: [] for arm in ARMS}

    def begin(self, epoch: int) -> None:
        """Count for this gray release from now on; 0: there is none."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._counts = {}
            self._seen = {arm: bytearray(PPM if epoch else 0) for arm in ARMS}
            self._new = {arm: [] for arm in ARMS}

    def answered(self, assigned: Assignment, outcome: Outcome) -> None:
        """Count one reply, by the split that was in force when the request came."""
        if not assigned.epoch or assigned.epoch != self.epoch:
            return
        counts = self._of(Sample(assigned.arm, assigned.compared))
        plain = counts.plain
        plain["requests"] += 1
        plain["errors"] += outcome.failed
        plain["deadline_misses"] += outcome.late
        plain["degraded"] += outcome.degraded
        plain["candidates"] += outcome.candidates
        plain["missing_rows"] += outcome.missing_rows
        plain["cold"] += outcome.cold
        plain["impressions"] += outcome.shown
        counts.latency[bucket_of_ms(outcome.took_ms)] += 1
        if assigned.compared and not (seen := self._seen[assigned.arm])[assigned.bucket_ppm]:
            seen[assigned.bucket_ppm] = 1
            self._new[assigned.arm].append(assigned.bucket_ppm)

    def happened(self, shown: Attribution, event: str) -> bool:
        """Count one feedback event for what showed its item; False when that belongs to no sample of this epoch."""
        if not shown.epoch or shown.epoch != self.epoch:
            return False
        counts = self._of(Sample(shown.arm, shown.compared))
        if event in counts.events or len(counts.events) < MAX_EVENT_NAMES:
            counts.events[event] += 1
        return True

    def figures(self) -> dict[Sample, Figures]:
        """Copies of all counts."""
        return {
            sample: Figures(**counts.plain, events=dict(counts.events), latency=dict(counts.latency))
            for sample, counts in self._counts.items()
        }

    def new_buckets(self) -> dict[Arm, list[int]]:
        """Buckets of compared requests that were not told yet."""
        return {arm: list(buckets) for arm, buckets in self._new.items()}

    def told(self, epoch: int, buckets: dict[Arm, list[int]]) -> None:
        """The buckets, as `new_buckets` gave them, are known to everybody."""
        if epoch == self.epoch:
            for arm, known in buckets.items():
                del self._new[arm][: len(known)]

    def _of(self, sample: Sample) -> _Counts:
        counts = self._counts.get(sample)
        if counts is None:
            counts = self._counts[sample] = _Counts()
        return counts
