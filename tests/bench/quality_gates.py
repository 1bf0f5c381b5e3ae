"""`python -m tests.bench.quality_gates`: the gates on what a recommender shows, on simulated releases: how often they
are wrong when nothing is, and after how many answers they are right.

Everything goes through the product's own functions; only the answers are drawn at random. Ends with status 1 when a
false verdict is more frequent than alpha.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np

from reranker.gray.gates import judge
from reranker.gray.measures import Figures, bucket_of_score, bucket_of_unit
from reranker.gray.plan import Gate
from reranker.gray.readings import Readings, Window

ALPHA, LOOKS, EACH, K = 0.005, 100, 50, 20
OVERLAP = Gate(metric="overlap_at_k", kind="minimum", limit=0.5, alpha=ALPHA)
DRIFT = Gate(metric="score_drift", limit=0.1, alpha=ALPHA)

# Draws what EACH more answers add to a window: the candidate release's figures, the baseline's, and the shadow's.
Draw = Callable[[np.random.Generator], tuple[Figures, Figures, Figures]]


def main() -> int:
    """Print each figure; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.quality_gates", description=__doc__)
    options.add_argument("--releases", type=int, default=400)
    n = options.parse_args().releases
    good = [
        _false(OVERLAP, "overlap@k exactly at the limit", _overlap(0.5), n),
        _false(DRIFT, "the same scores", _scores(0.0), n),
        _false(DRIFT, "scores that drift by a PSI of 0.09, allowed are 0.1", _scores(0.3), n),
    ]
    _found(OVERLAP, "overlap@k 0.05 under the limit of 0.5", _overlap(0.45), n)
    _found(OVERLAP, "overlap@k 0.2 under the limit of 0.5", _overlap(0.3), n)
    _found(DRIFT, "scores that drift by a PSI of 0.25, allowed are 0.1", _scores(0.5), n)
    _found(DRIFT, "scores that drift by a PSI of 1, allowed are 0.1", _scores(1.0), n)
    return 0 if all(good) else 1


def _overlap(mean: float) -> Draw:
    def draw(rng: np.random.Generator) -> tuple[Figures, Figures, Figures]:
        # Users differ: each has a share of his own around the mean.
        shares = rng.binomial(K, rng.beta(8 * mean, 8 * (1 - mean), EACH)) / K
        return Figures(), Figures(), Figures(requests=EACH, overlap=Counter(map(bucket_of_unit, shares.tolist())))

    return draw


def _scores(shift: float) -> Draw:
    def one(rng: np.random.Generator, by: float) -> Figures:
        # The scores of one answer belong together: half of their variance is the user's.
        logits = by + (rng.normal(size=(EACH, 1)) + rng.normal(size=(EACH, K))) / np.sqrt(2)
        scores = 1.0 / (1.0 + np.exp(-logits.ravel()))
        return Figures(requests=EACH, scores=Counter(map(bucket_of_score, scores.tolist())))

    return lambda rng: (one(rng, shift), one(rng, 0.0), Figures())


def _first(gate: Gate, draw: Draw, rng: np.random.Generator) -> int:
    """Answers at the first look that says unhealthy; 0 for none."""
    mine, base, shadow = Figures(), Figures(), Figures()
    for look in range(1, LOOKS + 1):
        more = draw(rng)
        mine, base, shadow = mine.plus(more[0]), base.plus(more[1]), shadow.plus(more[2])
        window = Window(mine, mine, base, shadow, base)
        if judge(gate, Readings((window,) * 3, window, window)).verdict == "unhealthy":
            return look * EACH
    return 0


def _false(gate: Gate, what: str, draw: Draw, n: int) -> bool:
    found = sum(bool(_first(gate, draw, np.random.default_rng(i))) for i in range(n))
    # Three standard deviations of what alpha allows, for the draws are few.
    good = found <= n * ALPHA + 3 * math.sqrt(n * ALPHA)
    print(f"{'ok   ' if good else 'FAILS'} {gate.metric}: {what}: called unhealthy in {found} of {n} releases of "
          f"{LOOKS * EACH:,} answers with {LOOKS} looks")  # fmt: skip
    return good


def _found(gate: Gate, what: str, draw: Draw, n: int) -> None:
    found = np.array([_first(gate, draw, np.random.default_rng(i)) for i in range(n // 4)])
    seen = found[found > 0]
    said = f"after {np.median(seen):,.0f} answers (median)" if seen.size else "never"
    print(f"      {gate.metric}: {what}: found in {seen.size} of {n // 4}, {said}")


if __name__ == "__main__":
    sys.exit(main())
