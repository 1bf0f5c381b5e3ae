"""What one gateway has counted for the gray release that runs: a few samples, each a set of growing counts.

Counts only the newest epoch: an event that belongs to an earlier gray release, or to none, changes nothing. Requests
whose arm was forced by a list or a header are not in any sample. Distinct units, and distinct items shown, are counted
by their places in a million, which all gateways share; each new one is told once. No count names a user or an item.
Belongs to one event loop. Invariant: counts of an epoch never fall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import xxhash

from reranker.gray.attribution import Attribution
from reranker.gray.compare import Likeness
from reranker.gray.measures import Figures, bucket_of_age, bucket_of_ms, bucket_of_score, bucket_of_unit
from reranker.gray.split import PPM, Arm, Assignment

ARMS: tuple[Arm, Arm] = ("stable", "candidate")
# Whose answers are counted together: what was shown, what the candidate release would have answered, and what was
# answered to the very same requests.
Group = Literal["stable", "candidate", "shadow", "shadowed"]
# Bitmaps of a million places: the units that saw an arm, the items that an arm has shown.
Seen = Literal["stable", "candidate", "stable:items", "candidate:items"]
SEEN: tuple[Seen, ...] = ("stable", "candidate", "stable:items", "candidate:items")
_ITEMS_OF: dict[Arm, Seen] = {"stable": "stable:items", "candidate": "candidate:items"}
# Places told at once, so that a gateway that has just started does not hold Redis up.
MAX_TOLD = 5_000
# Kinds of events one sample tells apart; further ones are not counted.
MAX_EVENT_NAMES = 64


class Sample(NamedTuple):
    """Which requests are counted together."""

    arm: Group
    compared: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """What is looked at once an answer has left: the items shown with their scores (probabilities), best first, and
    the age of the rows behind them (None: no row was read)."""

    items: Sequence[str]
    scores: Sequence[float]
    age_s: float | None


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
    scores: Counter[int] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    overlap: Counter[int] = field(default_factory=Counter)
    agreement: Counter[int] = field(default_factory=Counter)

    def answered(self, outcome: Outcome) -> None:
        """Add one answer."""
        plain = self.plain
        plain["requests"] += 1
        plain["errors"] += outcome.failed
        plain["deadline_misses"] += outcome.late
        plain["degraded"] += outcome.degraded
        plain["candidates"] += outcome.candidates
        plain["missing_rows"] += outcome.missing_rows
        plain["cold"] += outcome.cold
        plain["impressions"] += outcome.shown
        self.latency[bucket_of_ms(outcome.took_ms)] += 1

    def seen(self, sight: Sight) -> None:
        """Add what an answer showed."""
        for score in sight.scores:
            self.scores[bucket_of_score(score)] += 1
        if sight.age_s is not None:
            self.ages[bucket_of_age(sight.age_s)] += 1


class Tally:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.epoch = 0
        self._counts: dict[Sample, _Counts] = {}
        self._seen: dict[Seen, bytearray] = {seen: bytearray() for seen in SEEN}
        self._new: dict[Seen, list[int]] = {seen: [] for seen in SEEN}

    def begin(self, epoch: int) -> None:
        """Count for this gray release from now on; 0: there is none."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._counts = {}
            self._seen = {seen: bytearray(PPM if epoch else 0) for seen in SEEN}
            self._new = {seen: [] for seen in SEEN}

    def answered(self, assigned: Assignment, outcome: Outcome) -> None:
        """Count one reply, by the split that was in force when the request came."""
        if not assigned.epoch or assigned.epoch != self.epoch:
            return
        self._of(Sample(assigned.arm, assigned.compared)).answered(outcome)
        if assigned.compared:
            self._place(assigned.arm, assigned.bucket_ppm)

    def showed(self, assigned: Assignment, sight: Sight) -> None:
        """Look at what one answer of the two compared samples has shown."""
        if not assigned.compared or assigned.epoch != self.epoch:
            return
        self._of(Sample(assigned.arm, True)).seen(sight)
        for item in sight.items:
            self._place(_ITEMS_OF[assigned.arm], xxhash.xxh3_64_intdigest(item.encode()) * PPM >> 64)

    def shadowed(
        self, epoch: int, shown: tuple[Outcome, Sight], shadow: tuple[Outcome, Sight], alike: Likeness | None
    ) -> None:
        """Count one request that the candidate release scored for nobody, beside what was shown; `alike` is None when
        one of the two answers is not whole."""
        if not epoch or epoch != self.epoch:
            return
        groups: tuple[tuple[Group, tuple[Outcome, Sight]], ...] = (("shadowed", shown), ("shadow", shadow))
        for group, (outcome, sight) in groups:
            counts = self._of(Sample(group, True))
            counts.answered(outcome)
            counts.seen(sight)
        if alike is not None:
            counts.overlap[bucket_of_unit(alike.overlap)] += 1
            counts.agreement[bucket_of_unit(alike.agreement)] += 1

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
            sample: Figures(
                **counts.plain,
                events=dict(counts.events),
                latency=dict(counts.latency),
                scores=dict(counts.scores),
                ages=dict(counts.ages),
                overlap=dict(counts.overlap),
                agreement=dict(counts.agreement),
            )
            for sample, counts in self._counts.items()
        }

    def new_places(self) -> dict[Seen, list[int]]:
        """Places of units and items of compared requests that were not told yet, MAX_TOLD of each at most."""
        return {seen: places[:MAX_TOLD] for seen, places in self._new.items()}

    def told(self, epoch: int, places: dict[Seen, list[int]]) -> None:
        """The places, as `new_places` gave them, are known to everybody."""
        if epoch == self.epoch:
            for seen, known in places.items():
                del self._new[seen][: len(known)]

    def _place(self, seen: Seen, place: int) -> None:
        if not (known := self._seen[seen])[place]:
            known[place] = 1
            self._new[seen].append(place)

    def _of(self, sample: Sample) -> _Counts:
        counts = self._counts.get(sample)
        if counts is None:
            counts = self._counts[sample] = _Counts()
        return counts
