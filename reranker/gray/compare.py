"""How alike two answers to the same request are: one was shown, the other made in the shadow. Pure.

Both measures are in [0, 1], 1 when the answers are the same. Refuses nothing: two empty answers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Likeness:
    """`overlap`: the share of the places whose item is in both answers (overlap@k). `agreement`: how far both order
    the items alike, (tau + 1) / 2: 0.5 when there is no relation, 0 when one is the other upside down."""

    overlap: float
    agreement: float


def likeness(shown: Sequence[str], shadow: Sequence[str]) -> Likeness:
    """How alike two lists of items are, best first, each item once."""
    places = max(len(shown), len(shadow))
    if not places:
        return Likeness(1.0, 1.0)
    return Likeness(len({*shown} & {*shadow}) / places, 1.0 - kendall_distance(shown, shadow))


def kendall_distance(one: Sequence[str], other: Sequence[str]) -> float:
    """Kendall's distance of two top-k lists over its largest value, in [0, 1].

    K with p = 1/2 of Fagin, Kumar and Sivakumar, "Comparing top k lists" (2003): a pair of items counts 1 when the
    lists order it the other way round, as far as they say (an item that is not in a list is behind all that are), and
    1/2 when one list has both and the other neither. The largest value is that of two lists without a common item.
    """
    items = list(dict.fromkeys((*one, *other)))
    if len(items) < 2:
        return 0.0 if {*one} == {*other} else 1.0
    signs = [_order(items, ranked) for ranked in (one, other)]
    apart = float(np.abs(signs[0] - signs[1]).sum()) / 4.0
    n, m = len(one), len(other)
    common = n + m - len(items)
    return apart / _largest(n, m, common)


def _order(items: Sequence[str], ranked: Sequence[str]) -> NDArray[np.float64]:
    """Sign of the order of every pair, f64[n, n]; 0 where the list says nothing."""
    rank_of = {item: rank for rank, item in enumerate(ranked)}
    ranks = np.array([rank_of.get(item, len(ranked)) for item in items], np.float64)
    return np.sign(ranks[:, None] - ranks[None, :])


def _largest(n: int, m: int, common: int) -> float:
    """The value when lists of n and m items with so many in common contradict each other wherever they can."""
    mine, theirs = n - common, m - common
    among_common = common * (common - 1) / 2
    mixed = common * (mine + theirs) + mine * theirs
    ties = (mine * (mine - 1) + theirs * (theirs - 1)) / 4.0
    return among_common + mixed + ties
