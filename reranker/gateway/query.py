"""One ranking request after parsing: ids as strings, each candidate once, what is excluded taken out.

Pure. Invariant: `candidates` and `candidate_keys` are aligned and hold no excluded key; the first of duplicates stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_service.hashing import ITEM, keys_of
from reranker.gateway.degrade import Budget
from reranker.gateway.schemas import RankRequest, RecommendRequest, text_id, text_ids

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """What the pipeline answers. `candidates` None: recall them. `repeats_history`: rank items of the history too.
    `nonce` are 8 bytes that no other request has."""

    nonce: bytes
    request_id: str
    trace_id: str
    user_id: str | None
    session_id: str | None
    k: int
    candidates: list[str] | None
    candidate_keys: I64
    excluded: frozenset[int]
    duplicates: int
    repeats_history: bool
    context: Mapping[str, Any]
    explain: bool
    budget: Budget

    @property
    def unit(self) -> str:
        """What the split is keyed by: the user, else the session, else this one request."""
        return self.user_id or self.session_id or self.request_id

    def without(self, keys: I64) -> Query:
        """The same query with these items neither ranked nor recalled."""
        if keys.size == 0:
            return self
        excluded = self.excluded.union(keys.tolist())
        if self.candidates is None:
            return replace(self, excluded=excluded)
        stays = ~np.isin(self.candidate_keys, keys)
        return replace(
            self,
            excluded=excluded,
            candidates=[c for c, kept in zip(self.candidates, stays.tolist(), strict=True) if kept],
            candidate_keys=self.candidate_keys[stays],
        )


def query_of(
    asked: RecommendRequest | RankRequest,
    *,
    nonce: bytes,
    trace_id: str | None,
    start_s: float,
    default_deadline_ms: float,
) -> Query:
    """The query of a parsed body. Raises Problem (422) for an id of more than 256 bytes."""
    request_id = asked.request_id or nonce.hex()
    excluded = frozenset(keys_of(ITEM, text_ids(asked.exclude, "exclude")).tolist()) if asked.exclude else frozenset()
    candidates, keys, duplicates = None, np.empty(0, np.int64), 0
    if asked.candidates is not None:
        given = text_ids(asked.candidates, "candidates")
        candidates, keys = _distinct(given, excluded)
        duplicates = len(given) - len(set(given))
    return Query(
        nonce=nonce,
        request_id=request_id,
        trace_id=trace_id or request_id,
        user_id=None if asked.user_id is None else text_id(asked.user_id, "user_id"),
        session_id=None if asked.session_id is None else text_id(asked.session_id, "session_id"),
        k=asked.k,
        candidates=candidates,
        candidate_keys=keys,
        excluded=excluded,
        duplicates=duplicates,
        repeats_history=isinstance(asked, RankRequest),
        context=asked.context,
        explain=asked.explain,
        budget=Budget(start_s, (asked.deadline_ms or default_deadline_ms) / 1000.0),
    )


def _distinct(ids: list[str], excluded: frozenset[int]) -> tuple[list[str], I64]:
    by_key: dict[int, str] = {}
    for key, item_id in zip(keys_of(ITEM, ids).tolist(), ids, strict=True):
        if key not in excluded:
            by_key.setdefault(key, item_id)
    return list(by_key.values()), np.fromiter(by_key, np.int64, len(by_key))
