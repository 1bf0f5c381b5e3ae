"""How far the scores of two samples have drifted apart: the population stability index, and how much of it is noise.

PSI = sum((p - q) * ln(p / q)) over ten buckets that hold a tenth of the baseline each (Siddiqi, "Credit Risk
Scorecards", 2006; by custom 0.1 is a change and 0.25 a large one). With equal distributions it is about (1/n + 1/m)
times a chi-square of 9 degrees of freedom (Yurdakul 2018); its tail is bounded as by Laurent and Massart (2000).
Answers, not items, are the sample size: the scores of one answer belong together. Pure. Invariant: the same counts
twice drift by 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BUCKETS = 10
# A bucket that one sample does not have counts as if it had this many.
_LEAST = 0.5


def psi(counts: Mapping[int, int], baseline: Mapping[int, int]) -> float:
    """The index of two histograms with the same buckets; both need counts."""
    edges = _edges(baseline)
    p, q = _shares(counts, edges), _shares(baseline, edges)
    return sum((one - other) * math.log(one / other) for one, other in zip(p, q, strict=True))


def noise(n: int, n_baseline: int, alpha: float) -> float:
    """What the index of two samples of n answers stays under with a chance of 1 - alpha, however often it is looked at:
    the bound is paid for anew whenever the samples have doubled."""
    looks = 1.0 + math.log2(max(2, min(n, n_baseline)))
    t = math.log(looks * (looks + 1.0) / alpha)
    free = BUCKETS - 1
    return (1.0 / n + 1.0 / n_baseline) * (free + 2.0 * math.sqrt(free * t) + 2.0 * t)


def _edges(baseline: Mapping[int, int]) -> list[int]:
    """Upper ends of the buckets that hold a tenth of the baseline each; fewer when it lies closer together."""
    total, below, tenths, edges = sum(baseline.values()), 0, 0, list[int]()
    for at in sorted(baseline):
        below += baseline[at]
        if tenths < (reached := below * BUCKETS // total) < BUCKETS:
            edges.append(at)
            tenths = reached
    return edges


def _shares(counts: Mapping[int, int], edges: list[int]) -> list[float]:
    found = [_LEAST] * (len(edges) + 1)
    for at, n in counts.items():
        found[sum(at > edge for edge in edges)] += n
    total = sum(found)
    return [one / total for one in found]
