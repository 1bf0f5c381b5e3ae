"""Each gate's verdict on a release, with the sentence that says why: healthy, unhealthy or inconclusive. Pure.

A fault is looked for in the newest seconds, half minute and minute, so that one which begins late is not drowned by
what was good before, and in the whole step, where a small one shows. What stable suffers too (Redis is away for
everybody) is no fault of the candidate release. Invariant: too little data is inconclusive, never healthy.
"""

from __future__ import annotations

from reranker.gray.measures import Figures, Measure, above, measure_of, quantile_bucket, upper_ms
from reranker.gray.plan import Gate
from reranker.gray.quality_gates import age, distinct, drift, mean, too_few
from reranker.gray.readings import Finding, Readings, Window
from reranker.gray.sequential import (
    counts_differ,
    rate_is_higher,
    rate_is_lower,
    share_exceeds,
    threshold,
)
from reranker.gray.state import Verdict

MISMATCH_ALPHA = 0.001
# Stable's own share of faults is forgiven the candidate release with this reserve.
FORGIVEN = 2.0
LEAST_FORGIVEN = 10  # requests of the baseline


def judge(gate: Gate, readings: Readings) -> Finding:
    """The verdict of one gate."""
    measure = measure_of(gate.metric)
    if measure is None:
        return Finding(gate.metric, "inconclusive", f"{gate.metric}: there is no such metric", gate.dry_run)
    if measure.kind == "share":
        return _limit(gate, measure, readings)
    if measure.kind == "latency":
        return _ratio(gate, measure, readings)
    if measure.kind == "event_rate":
        return _rate(gate, measure, readings.total)
    return {"mean": mean, "drift": drift, "distinct": distinct, "age": age}[measure.kind](gate, measure, readings)


def not_shown(gate: Gate) -> Finding | None:
    """The finding of a gate that shadow traffic says nothing about; None for one that it does."""
    measure = measure_of(gate.metric)
    if measure is None or measure.source != "shown":
        return None
    said = f"{gate.metric}: waits until the candidate release is shown to somebody"
    return Finding(gate.metric, "inconclusive", said, gate.dry_run, waits=True)


def mismatch(total: Window) -> Finding:
    """Whether the two samples have as many units as they should: equally many. A mismatch means that the comparison
    cannot be trusted (requests are lost, repeated or routed by arm), whatever the other gates say."""
    one, other = total.compared.units, total.baseline.units
    counts = f"{one} units saw the candidate release and {other} the baseline"
    if counts_differ(one, other) >= threshold(MISMATCH_ALPHA):
        return Finding("sample_ratio", "unhealthy", f"sample ratio mismatch: {counts}; they should be equally many")
    return Finding("sample_ratio", "healthy", f"sample ratio: {counts}")


def _limit(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    x, n = measure.counts(readings.step.candidate)
    x_base, n_base = measure.counts(readings.step.baseline)
    values = _share(x, n), _share(x_base, n_base)
    for window, alpha, span in readings.spans(gate.alpha, readings.step):
        bad, of = measure.counts(window.candidate)
        allowed = _allowed(gate, measure, window)
        if share_exceeds(bad, of, allowed) >= threshold(alpha):
            said = f"{gate.metric}: {bad} of {of} ({bad / of:.2%}) in {span}, allowed is {allowed:.2%}"
            return Finding(gate.metric, "unhealthy", said, gate.dry_run, *values)
    if n < gate.min_samples:
        return Finding(gate.metric, "inconclusive", too_few(gate, n), gate.dry_run, *values)
    allowed = _allowed(gate, measure, readings.step)
    said = f"{gate.metric}: {x} of {n} ({x / n:.2%}), allowed is {allowed:.2%}"
    return Finding(gate.metric, "healthy" if x / n <= allowed else "inconclusive", said, gate.dry_run, *values)


def _allowed(gate: Gate, measure: Measure, window: Window) -> float:
    x, n = measure.counts(window.baseline)
    own = min(1.0, FORGIVEN * x / n) if n >= LEAST_FORGIVEN else 0.0
    return max(1.0 - gate.limit if measure.least else gate.limit, own)


def _ratio(gate: Gate, measure: Measure, readings: Readings) -> Finding:
    """A quantile q is too large when more than 1 - q of the requests take longer than `limit` times the baseline's."""
    step = readings.step if readings.step.baseline.requests else readings.total
    q = measure.quantile
    values = _quantile_ms(step.compared, q), _quantile_ms(step.baseline, q)
    for window, alpha, span in readings.spans(gate.alpha, step):
        bound = _upper_bound(window.baseline, q, gate)
        if bound is None:
            continue
        slow, n = above(window.compared.latency, bound), sum(window.compared.latency.values())
        if share_exceeds(slow, n, 1.0 - q) >= threshold(alpha):
            said = (
                f"{gate.metric}: {slow / n:.2%} of {n} requests in {span} took more than {gate.limit:g} times the "
                f"baseline's {upper_ms(quantile_bucket(window.baseline.latency, q)):.1f} ms, allowed is {1 - q:.0%}"
            )
            return Finding(gate.metric, "unhealthy", said, gate.dry_run, *values)
    n = min(step.compared.requests, step.baseline.requests)
    least = max(gate.min_samples, _least_for(q))
    if n < least or values[0] is None or values[1] is None:
        return Finding(gate.metric, "inconclusive", too_few(gate, n, least), gate.dry_run, *values)
    ratio = values[0] / values[1]
    said = f"{gate.metric}: {values[0]:.1f} ms, {ratio:.2f} times the baseline's, allowed is {gate.limit:g} times"
    return Finding(gate.metric, "healthy" if ratio <= gate.limit else "inconclusive", said, gate.dry_run, *values)


def _upper_bound(baseline: Figures, q: float, gate: Gate) -> int | None:
    """The bucket that `limit` times the baseline's quantile lies in, with the quantile at the upper end of what the
    sample allows (2 sigma); None while the sample is too small for that."""
    n = sum(baseline.latency.values())
    upper = q + 2.0 * (q * (1.0 - q) / n) ** 0.5 if n else 1.0
    if n < gate.min_samples or upper >= 1.0:
        return None
    return quantile_bucket(baseline.latency, upper) + _buckets_of(gate.limit)


def _rate(gate: Gate, measure: Measure, total: Window) -> Finding:
    x, n = measure.counts(total.compared)
    x_base, n_base = measure.counts(total.baseline)
    values = _share(x, n), _share(x_base, n_base)
    least = min(n, n_base)
    if least < gate.min_samples or values[0] is None or values[1] is None:
        return Finding(gate.metric, "inconclusive", too_few(gate, least), gate.dry_run, *values)
    needed, counts = threshold(gate.alpha), (x, n, x_base, n_base)
    said = f"{gate.metric}: {values[0]:.3%} of {n} against the baseline's {values[1]:.3%} of {n_base}"
    verdict: Verdict = "inconclusive"
    if gate.kind == "non_inferiority" and rate_is_higher(*counts, factor=1 - gate.limit, effect=gate.limit) >= needed:
        verdict, said = "healthy", f"{said}; a drop of {gate.limit:.0%} is ruled out"
    elif gate.kind == "superiority" and rate_is_higher(*counts, effect=gate.limit) >= needed:
        verdict, said = "healthy", f"{said}; it is higher"
    elif rate_is_lower(*counts, effect=gate.limit) >= needed:
        verdict, said = "unhealthy", f"{said}; it is lower"
    else:
        said = f"{said}; neither is shown yet"
    return Finding(gate.metric, verdict, said, gate.dry_run, *values)


def _least_for(q: float) -> int:
    """Samples from which a quantile is one: ten beyond it."""
    return round(10.0 / (1.0 - q))


def _share(x: int, n: int) -> float | None:
    return x / n if n else None


def _quantile_ms(figures: Figures, q: float) -> float | None:
    return upper_ms(quantile_bucket(figures.latency, q)) if figures.latency else None


def _buckets_of(factor: float) -> int:
    """How many latency buckets lie between a time and `factor` times it."""
    bucket = 0
    while upper_ms(bucket + 1) <= factor * upper_ms(0):
        bucket += 1
    return bucket
