"""Evidence that may be looked at after every request: e-values, and what they say. Pure, natural logarithms.

An e-value starts at 1 and, while its null hypothesis holds, exceeds 1/alpha with a chance of at most alpha, however
often it is looked at (Ville's inequality). So a verdict at `log_e >= log(1/alpha)` needs no plan of when to look.

- One share against a limit: a likelihood ratio averaged over a fixed grid of larger shares. Exact for p <= limit.
- Two rates: a mixture sequential probability ratio test (Robbins 1970; Johari, Koomen, Pekelis and Walsh 2017) on their
  difference; the mixing distribution is a normal cut at zero, narrow, around the smallest difference that matters:
  nearly Wald's test, the one that needs the fewest samples there. As in Howard, Ramdas, McAuliffe and Sekhon
  (2021, section 3.2, one-sided normal mixture) with an estimated variance (asymptotic: Waudby-Smith and others 2021).
- A mean of values in [0, 1] against a least value: bets of fixed sizes on every value, averaged (Waudby-Smith and
  Ramdas 2024, "Estimating means of bounded random variables by betting"). Exact for a mean >= the least value.
- Two counts that should be equal: a beta mixture against one half (Lindon and Malek 2022). Exact.

Refuses nothing; without samples the evidence is 0. Outcomes are taken as independent: events that come in bursts from
few users make the two-rate test too sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Alternatives of the share test, as multiples of the limit's odds.
ODDS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
# Sizes of the bets against a mean, as shares of the largest that can be paid.
BETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
# Width of the mixing distribution over the difference it is centred at.
WIDTH = 0.05
# The normal approximation of a rate needs this many events in both samples together.
MIN_EVENTS = 20


def threshold(alpha: float) -> float:
    """The log e-value that is a verdict."""
    return math.log(1.0 / alpha)


def share_exceeds(x: int, n: int, limit: float) -> float:
    """Log evidence that the share behind `x` of `n` is more than `limit`, in (0, 1]."""
    if n <= 0 or limit >= 1.0:
        return 0.0
    odds = limit / (1.0 - limit)
    logs = []
    for factor in ODDS:
        p = factor * odds / (1.0 + factor * odds)
        logs.append(x * math.log(p / limit) + (n - x) * math.log((1.0 - p) / (1.0 - limit)))
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))


def mean_is_below(counts: Mapping[int, int], steps: int, least: float) -> float:
    """Log evidence that the mean of values in [0, 1] is less than `least`, in (0, 1].

    `counts[i]` values count as i / steps. Each bet pays 1 + size * (least - value), on average at most 1 when the mean
    is not less than `least`.
    """
    if not 0.0 < least <= 1.0 or not counts:
        return 0.0
    # A bet of size 1 / (1 - least) could be lost whole; with `least` 1 nothing can be lost, but a finite bet is enough.
    most = 1.0 / max(1.0 - least, 0.05)
    logs = [
        sum(n * math.log1p(share * most * (least - at / steps)) for at, n in counts.items() if n > 0) for share in BETS
    ]
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))


def rate_is_lower(x: int, n: int, x_base: int, n_base: int, *, factor: float = 1.0, effect: float) -> float:
    """Log evidence that the rate x/n is less than `factor` times the rate x_base/n_base.

    `effect`: the difference looked for, relative to the base rate. 0 until both samples have 20 events together.
    """
    return _difference(x, n, x_base, n_base, factor, effect, -1.0)


def rate_is_higher(x: int, n: int, x_base: int, n_base: int, *, factor: float = 1.0, effect: float) -> float:
    """Log evidence that the rate x/n is more than `factor` times the rate x_base/n_base. As `rate_is_lower`."""
    return _difference(x, n, x_base, n_base, factor, effect, 1.0)


def counts_differ(one: int, other: int) -> float:
    """Log evidence that two counts do not come from equal chances."""
    n = one + other
    beta = math.lgamma(one + 1) + math.lgamma(other + 1) - math.lgamma(n + 2)
    return beta + n * math.log(2.0)


def _difference(x: int, n: int, x_base: int, n_base: int, factor: float, effect: float, sign: float) -> float:
    if n <= 0 or n_base <= 0 or x + x_base < MIN_EVENTS:
        return 0.0
    # At the null's edge the rates are `base` and `factor * base`; the variance is that of the difference there.
    base = (x + x_base + 1.0) / (factor * n + n_base + 2.0)
    mine = factor * base
    variance = mine * (1.0 - mine) / n + factor * factor * base * (1.0 - base) / n_base
    if not 0.0 < mine < 1.0 or not 0.0 < base < 1.0:
        return 0.0
    difference = sign * (x / n - factor * x_base / n_base)
    return _log_mixture(difference, variance, effect * base)


def _log_mixture(difference: float, variance: float, effect: float) -> float:
    """Log of the likelihood ratio of a normal mean, mixed over N(effect, (WIDTH * effect)^2) above 0, to mean 0."""
    width = WIDTH * effect
    information = 1.0 / variance + 1.0 / width**2
    pulled = difference / variance + effect / width**2
    at = pulled / math.sqrt(information)
    return (
        0.5 * at * at
        - 0.5 / WIDTH**2
        - math.log(width * math.sqrt(information))
        + _log_normal_cdf(at)
        - _log_normal_cdf(1.0 / WIDTH)
    )


def _log_normal_cdf(z: float) -> float:
    if z < -30.0:
        return -0.5 * z * z - math.log(-z * math.sqrt(2.0 * math.pi))
    return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
