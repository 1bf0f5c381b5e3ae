"""Which rows leave a bounded tier: scores of 32 bits, the least one goes first. Pure.

- `lru`: the score is the time of the last use.
- `lfu`: the score is the logarithm of a count of uses that halves every `half_life_s`. Seen from a fixed moment such a
  count never changes but by uses (Lee et al. 2001, "LRFU"), so nothing has to be swept: one use now weighs
  `2 ** (age / half_life)`, and a score is the logarithm of the sum of those weights.
- `ttl`: the score is the time of arrival; rows that arrived more than `ttl_s` ago go even where there is room.

A pinned row has the greatest score and never leaves. Invariant: scores of one table compare at any two moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from param_server.contract import F32

U32 = NDArray[np.uint32]
Kind = Literal["lru", "lfu", "ttl"]

PINNED = 2**32 - 1
KEEP, RECENT, FREQUENT = 0, 1, 2
_MODES = {"ttl": KEEP, "lru": RECENT, "lfu": FREQUENT}
# One doubling of a count, in units of a score; a second, for the policies that go by time.
_DOUBLING = 1 << 16
_SECOND = 64
# Beyond 16 doublings one use more adds nothing that 16 bits can show.
GAIN_STEP = 256


@dataclass(frozen=True, slots=True)
class Policy:
    """How rows of a tier are scored. Ages are seconds since the table began."""

    kind: Kind = "lfu"
    half_life_s: float = 3600.0
    ttl_s: float = 86400.0

    @property
    def mode(self) -> int:
        """What a use does to a score: KEEP, RECENT or FREQUENT; for the compiled loops."""
        return _MODES[self.kind]

    def tick(self, age_s: float) -> int:
        """Score of a single use at that age."""
        units = age_s / self.half_life_s * _DOUBLING if self.kind == "lfu" else age_s * _SECOND
        return min(max(int(units), 0), PINNED - 1)

    def fresh(self, counts: NDArray[np.generic], tick: int) -> U32:
        """Scores u32[n] of rows that arrive now, used about `counts` times before."""
        if self.kind != "lfu":
            return np.full(counts.size, tick, np.uint32)
        scores = tick + _DOUBLING * np.log2(np.maximum(counts, 1).astype(np.float64))
        fresh: U32 = np.minimum(scores, PINNED - 1).astype(np.uint32)
        return fresh

    def counts(self, scores: U32, tick: int) -> F32:
        """About how often rows of these scores were used, as of now: f32[n]; by time alone, 1 and less."""
        per_doubling = _DOUBLING if self.kind == "lfu" else _SECOND * self.half_life_s
        behind = np.minimum(scores, PINNED - 1).astype(np.float64) - tick
        return np.exp2(np.clip(behind / per_doubling, -64, 24)).astype(np.float32)

    def expired_below(self, age_s: float) -> int:
        """Rows with a lesser score have lived too long; 0 when no age is too great."""
        return self.tick(age_s - self.ttl_s) if self.kind == "ttl" else 0


def gains() -> U32:
    """What one use adds to the greater of (score, tick), by how far they are apart in steps of GAIN_STEP."""
    apart = np.arange(0, 16 * _DOUBLING, GAIN_STEP, dtype=np.float64) / _DOUBLING
    gained: U32 = np.round(_DOUBLING * np.log2(1 + np.exp2(-apart))).astype(np.uint32)
    return gained
