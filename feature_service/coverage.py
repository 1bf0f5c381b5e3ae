"""How much was known of one request's users and items: the `coverage` of a reply.

Pure. Refuses to count a default row as found. Invariant: features_found + missing = candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

UserKind = Literal["known", "bucket", "anonymous"]

MAX_MISSING_IDS = 100


@dataclass(frozen=True, slots=True)
class Coverage:
    """Candidates of a request, how many were scored by a ranking tier, how many had a row of their own; at most
    MAX_MISSING_IDS of the others by id; and what stood for the user."""

    candidates: int
    scored: int
    features_found: int
    missing: int
    missing_ids: list[str]
    user: UserKind


def coverage_of(rows_found: NDArray[np.bool_], id_of: Callable[[int], str], *, scored: int, user: UserKind) -> Coverage:
    """Coverage of candidates whose rows were found or not, bool[N]; `id_of` names a candidate by its index."""
    missing = np.flatnonzero(~rows_found)
    return Coverage(
        candidates=rows_found.size,
        scored=scored,
        features_found=rows_found.size - missing.size,
        missing=missing.size,
        missing_ids=[id_of(int(index)) for index in missing[:MAX_MISSING_IDS]],
        user=user,
    )


def user_kind(user_key: int | None, own_row_found: bool) -> UserKind:
    """`known`: a row of his own; `bucket`: the row of his bucket stands in; `anonymous`: nobody said who he is."""
    if user_key is None:
        return "anonymous"
    return "known" if own_row_found else "bucket"
