"""Gates on what a recommender shows: likeness and order in the shadow, scores, catalogue, age of rows. Pure.

They are judged over the whole step (a quality does not break in ten seconds); distinct items and comparisons over the
whole release, because a later step may have no shadow traffic.
Refuses to be sure of little: fewer than `min_samples` comparisons or answers are inconclusive.
"""

from __future__ import annotations

import math

from reranker.gray.drift import noise, psi
from reranker.gray.measures import UNIT_STEPS, Measure, above, bucket_of_age, quantile_bucket, upper_age_s
from reranker.gray.plan import Gate
from reranker.gray.readings import Finding, Readings
from reranker.gray.sequential import mean_is_below, share_exceeds, threshold
from reranker.gray.split import PPM
from reranker.gray.state import Verdict

# What stable's rows suffer too is forgiven with this reserve, as shares of faults are.
FORGIVEN = 2.0
# Standard deviations of a count of distinct items that count as noise.
_SIGMAS = 4.0


def mean(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    """A mean of comparisons must not be less than the limit (rank correlations: from -1 to 1)."""
    counts, newest = getattr(readings.total.shadow, measure.part), getattr(readings.step.shadow, measure.part)
    n = sum(counts.values())
    if n < gate.min_samples:
        return Finding(gate.metric, "inconclusive", too_few(gate, n), gate.dry_run)
    scaled = measure.part == "agreement"
    value = sum(at * count for at, count in counts.items()) / (n * UNIT_STEPS)
    least = (gate.limit + 1.0) / 2.0 if scaled else gate.limit
    shown = 2.0 * value - 1.0 if scaled else value
    said = f"{gate.metric}: {shown:.3f} on average of {n} comparisons, at least {gate.limit:g} is wanted"
    verdict: Verdict = "healthy" if value >= least else "inconclusive"
    # Two looks at the same values, so each with half of alpha.
    if any(mean_is_below(some, UNIT_STEPS, least) >= threshold(gate.alpha / 2) for some in (counts, newest)):
        verdict = "unhealthy"
    return Finding(gate.metric, verdict, said, gate.dry_run, shown)


def drift(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    """The scores shown must not be distributed otherwise than the baseline's by more than the limit (PSI)."""
    mine, base = readings.step.compared, readings.step.baseline
    n, n_base = mine.requests - mine.degraded, base.requests - base.degraded
    if min(n, n_base) < gate.min_samples or not mine.scores or not base.scores:
        return Finding(gate.metric, "inconclusive", too_few(gate, min(n, n_base)), gate.dry_run)
    value, chance = psi(mine.scores, base.scores), noise(n, n_base, gate.alpha)
    said = f"{gate.metric}: {value:.3f} over {n} answers (chance alone: up to {chance:.3f}), allowed is {gate.limit:g}"
    verdict: Verdict = "healthy" if value <= gate.limit else "inconclusive"
    if value > gate.limit + chance:
        verdict = "unhealthy"
    return Finding(gate.metric, verdict, said, gate.dry_run, value)


def distinct(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    """As many answers must show at least `limit` times as many different items as the baseline's."""
    mine, base = readings.total.compared, readings.total.baseline
    n, n_base = mine.requests, base.requests
    items, items_base = distinct_items(mine.items), distinct_items(base.items)
    if min(n, n_base) < gate.min_samples or not items_base:
        return Finding(gate.metric, "inconclusive", too_few(gate, min(n, n_base)), gate.dry_run)
    # Fewer answers show fewer items, at most in proportion.
    ratio = items / items_base / min(1.0, n / n_base)
    spread = _SIGMAS * ratio * math.sqrt(1.0 / max(1.0, items) + 1.0 / items_base)
    said = (
        f"{gate.metric}: {items:.0f} items shown, {ratio:.2f} times the baseline's, at least {gate.limit:g} is wanted"
    )
    verdict: Verdict = "healthy" if ratio >= gate.limit else "inconclusive"
    if ratio + spread < gate.limit:
        verdict = "unhealthy"
    return Finding(gate.metric, verdict, said, gate.dry_run, items, items_base)


def age(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    """99 of 100 answers must have rows no older than `limit` seconds, as far as stable's are."""
    mine, base = readings.step.compared, readings.step.baseline
    n, n_base = sum(mine.ages.values()), sum(base.ages.values())
    if n < gate.min_samples:
        return Finding(gate.metric, "inconclusive", too_few(gate, n), gate.dry_run)
    bound = bucket_of_age(gate.limit)
    old = above(mine.ages, bound)
    own = FORGIVEN * above(base.ages, bound) / n_base if n_base else 0.0
    allowed = min(1.0, max(1.0 - measure.quantile, own))
    at = upper_age_s(quantile_bucket(mine.ages, measure.quantile))
    at_base = upper_age_s(quantile_bucket(base.ages, measure.quantile)) if n_base else None
    said = (
        f"{gate.metric}: {old / n:.2%} of {n} answers had rows older than {gate.limit:g} s, allowed is {allowed:.2%}; "
        f"the oldest of 100 are {at:.0f} s old"
    )
    verdict: Verdict = "healthy" if old / n <= allowed else "inconclusive"
    if share_exceeds(old, n, allowed) >= threshold(gate.alpha):
        verdict = "unhealthy"
    return Finding(gate.metric, verdict, said, gate.dry_run, at, at_base)


def distinct_items(places: int) -> float:
    """How many items took that many of a million places (linear counting: Whang, Vander-Zanden and Taylor 1990)."""
    return -PPM * math.log1p(-min(places, PPM - 1) / PPM)


def too_few(gate: Gate, n: int, least: int | None = None) -> str:
    """The sentence for a sample that is too small."""
    return f"{gate.metric}: {n} samples, at least {least or gate.min_samples} are needed"
