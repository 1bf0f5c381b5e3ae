"""What a gate can be about: the figures of one sample of requests, and the metrics made of them. Pure.

Figures are counts, so those of several gateways add up and the difference of two readings is the time between them.
Latencies are counted in buckets 5 % apart, ages of rows in buckets 10 % apart, scores by their logit. Nothing here
names a user or an item. Invariant: a share, a rate and a quantile are computed from one sample alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

SMALLEST_MS = 0.1
STEP = math.log(1.05)
N_BUCKETS = 300  # up to 0.1 ms * 1.05 ** 300: 227 s
SMALLEST_AGE_S = 0.1
AGE_STEP = math.log(1.1)
N_AGES = 206  # up to 0.1 s * 1.1 ** 206: a year
MAX_SCORE = 32
UNIT_STEPS = 100

K = TypeVar("K", bound=Hashable)
MeasureKind = Literal["share", "event_rate", "latency", "mean", "drift", "distinct", "age"]
Source = Literal["shown", "shadow", "either"]
CLICK_THROUGH = "click_through"
_EVENT_RATE = re.compile(r"rate:([A-Za-z0-9_.-]{1,64})")


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one sample. `latency[i]` counts requests of bucket i; `impressions` counts items shown, `events` the
    feedback events attributed to them; `units` counts distinct units, `items` distinct items shown, since the start.

    `scores` counts shown items by the bucket of their score, `ages` answers by the age of the rows; `overlap` and
    `agreement` count the comparisons of shadow traffic by their value in [0, 1], in steps of 1 / UNIT_STEPS.
    """

    requests: int = 0
    errors: int = 0
    deadline_misses: int = 0
    degraded: int = 0
    candidates: int = 0
    missing_rows: int = 0
    cold: int = 0
    units: int = 0
    impressions: int = 0
    items: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    latency: Mapping[int, int] = field(default_factory=dict)
    scores: Mapping[int, int] = field(default_factory=dict)
    ages: Mapping[int, int] = field(default_factory=dict)
    overlap: Mapping[int, int] = field(default_factory=dict)
    agreement: Mapping[int, int] = field(default_factory=dict)

    def plus(self, other: Figures) -> Figures:
        """Both samples as one."""
        return self._combined(other, 1)

    def minus(self, earlier: Figures) -> Figures:
        """What came since an earlier reading of the same counts."""
        return self._combined(earlier, -1)

    def _combined(self, other: Figures, sign: int) -> Figures:
        return Figures(
            **{name: getattr(self, name) + sign * getattr(other, name) for name in _COUNTS},
            events=_combined(self.events, other.events, sign),
            latency=_combined(self.latency, other.latency, sign),
            scores=_combined(self.scores, other.scores, sign),
            ages=_combined(self.ages, other.ages, sign),
            overlap=_combined(self.overlap, other.overlap, sign),
            agreement=_combined(self.agreement, other.agreement, sign),
        )


_COUNTS = (
    "requests", "errors", "deadline_misses", "degraded", "candidates", "missing_rows", "cold", "units", "impressions",
    "items",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric: how it is computed and which kinds of gate can be about it. `least`: more of it is better.
    `source`: whether it is about answers that were shown, about shadow traffic, or about either."""

    name: str
    kind: MeasureKind
    part: str = ""
    whole: str = "requests"
    quantile: float = 0.0
    least: bool = False
    source: Source = "shown"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of gate that make sense for it."""
        if self.kind == "event_rate":
            return ("non_inferiority", "superiority")
        if self.kind == "latency":
            return ("ratio",)
        return ("minimum",) if self.least else ("limit",)

    @property
    def is_share(self) -> bool:
        """Whether it is a share of requests (or of candidates) that should be small."""
        return self.kind == "share"

    def counts(self, figures: Figures) -> tuple[int, int]:
        """(part, whole) of a share or an event rate."""
        if self.kind == "event_rate":
            return min(figures.events.get(self.part, 0), figures.impressions), figures.impressions
        return getattr(figures, self.part), getattr(figures, self.whole)


_MEASURES = (
    Measure("error_share", "share", "errors", source="either"),
    Measure("deadline_miss_share", "share", "deadline_misses"),
    Measure("degraded_share", "share", "degraded", source="either"),
    Measure("missing_row_share", "share", "missing_rows", "candidates", source="either"),
    Measure("coverage", "share", "missing_rows", "candidates", least=True, source="either"),
    Measure("cold_share", "share", "cold", source="either"),
    Measure("latency_p50", "latency", quantile=0.5),
    Measure("latency_p99", "latency", quantile=0.99),
    Measure("overlap_at_k", "mean", "overlap", least=True, source="shadow"),
    Measure("rank_correlation", "mean", "agreement", least=True, source="shadow"),
    Measure("score_drift", "drift", "scores", source="either"),
    Measure("catalogue_share", "distinct", "items", least=True),
    Measure("embedding_staleness", "age", "ages", quantile=0.99, source="either"),
)
MEASURES: Mapping[str, Measure] = {measure.name: measure for measure in _MEASURES}


def measure_of(metric: str) -> Measure | None:
    """The measure of that name; `rate:EVENT` is events of that name per item shown. None when there is none."""
    name = "rate:click" if metric == CLICK_THROUGH else metric
    if rate := _EVENT_RATE.fullmatch(name):
        return Measure(metric, "event_rate", rate.group(1), "impressions")
    return MEASURES.get(metric)


def bucket_of_ms(ms: float) -> int:
    """The latency bucket; 0 holds everything up to 0.1 ms."""
    return 0 if ms <= SMALLEST_MS else min(N_BUCKETS, 1 + int(math.log(ms / SMALLEST_MS) / STEP))


def upper_ms(bucket: int) -> float:
    """The upper end of a latency bucket."""
    return SMALLEST_MS * math.exp(STEP * bucket)


def bucket_of_age(age_s: float) -> int:
    """The bucket of the age of rows; 0 holds everything up to 0.1 s, the last one a year and more."""
    return 0 if age_s <= SMALLEST_AGE_S else min(N_AGES, 1 + int(math.log(age_s / SMALLEST_AGE_S) / AGE_STEP))


def upper_age_s(bucket: int) -> float:
    """The upper end of a bucket of ages."""
    return SMALLEST_AGE_S * math.exp(AGE_STEP * bucket)


def bucket_of_score(score: float) -> int:
    """The bucket of a probability: its logit in quarters, from -32 to 32. NaN is not a score."""
    odds = min(max(score, 1e-9), 1.0 - 1e-9)
    return max(-MAX_SCORE, min(MAX_SCORE, math.floor(4.0 * math.log(odds / (1.0 - odds)))))


def bucket_of_unit(value: float) -> int:
    """The bucket of a value in [0, 1]; its upper end `bucket / UNIT_STEPS` is what it counts as."""
    return max(0, min(UNIT_STEPS, math.ceil(value * UNIT_STEPS - 1e-9)))


def quantile_bucket(latency: Mapping[int, int], q: float) -> int:
    """The bucket that holds the q-quantile. At least one count is needed."""
    left = q * sum(latency.values())
    bucket = 0
    for bucket in sorted(latency):
        left -= latency[bucket]
        if left <= 0:
            break
    return bucket


def above(latency: Mapping[int, int], bucket: int) -> int:
    """How many requests took longer than the upper end of that bucket."""
    return sum(count for at, count in latency.items() if at > bucket)


def _combined(mine: Mapping[K, int], other: Mapping[K, int], sign: int) -> dict[K, int]:
    return {key: mine.get(key, 0) + sign * other.get(key, 0) for key in {*mine, *other}}
