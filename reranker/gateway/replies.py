"""Replies made of what the stages gave: names, scores, versions, coverage, timings.

Decides nothing about the order. Scores are probabilities: the sigmoid of the logit of the stage that placed the item
(of the dot product for recall); for popular items, events over the most events. Invariant: an item of the answer has
an id, a rank from 1 on, and the name of the stage it owes its place to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, UnsetType

from infra.clock import Clock
from infra.release import EDGE_MODEL, RERANK_MODEL, Manifest
from reranker.gateway.catalogue import UNKNOWN, Catalogue
from reranker.gateway.degrade import Place, Scores, explain, sigmoid
from reranker.gateway.embeddings import Found
from reranker.gateway.query import Query
from reranker.gateway.schemas import (
    CoverageBlock,
    Degraded,
    Explanation,
    RankedItem,
    RecommendReply,
    ReleaseBlock,
    Stage,
    UserKind,
    Versions,
)
from reranker.gateway.trail import Trail
from reranker.gray.attribution import Signer

MAX_MISSING_IDS = 100


class ReplyMaker:
    """Makes the replies of one release. `signer` makes the ids that say what showed the items."""

    def __init__(self, manifest: Manifest, catalogue: Catalogue, signer: Signer, clock: Clock) -> None:
        self._name = manifest.name
        self._edge = manifest.files[EDGE_MODEL][:12]
        self._rerank = manifest.files[RERANK_MODEL][:12]
        self._generation = manifest.generation
        self._schema = manifest.schema_fingerprint
        self._catalogue = catalogue
        self._signer = signer
        self._clock = clock

    def ranked(
        self, query: Query, found: Found, scores: Scores, chosen: Sequence[Place], trail: Trail
    ) -> RecommendReply:
        """The reply to a query whose candidates were ranked; `chosen` are its places, best first."""
        items = self._places(query, found, scores, chosen)
        missing = np.flatnonzero(~found.rows_found)
        coverage = CoverageBlock(
            candidates=found.keys.size,
            scored=0 if scores.edge is None else found.keys.size,
            features_found=found.keys.size - missing.size,
            missing=missing.size,
            missing_ids=self._ids(query, found, missing[:MAX_MISSING_IDS].tolist()),
            user=found.user,
        )
        return self._reply(query, items, coverage, found.watermark_us // 1000, trail)

    def popular(self, query: Query, trail: Trail) -> RecommendReply:
        """The reply when there is nothing to rank by: the query's candidates, or any items, most popular first."""
        catalogue = self._catalogue
        if query.candidates is None:
            rows = catalogue.popular(query.k, query.excluded)
            named = [(catalogue.item(row).item_id, row) for row in rows]
        else:
            named = list(zip(query.candidates, catalogue.rows(query.candidate_keys).tolist(), strict=True))
            named.sort(key=lambda pair: -catalogue.popularity(pair[1]))
        items = [
            self._explained(item_id, row, catalogue.popularity(row), rank, "popular")
            if query.explain
            else RankedItem(item_id, catalogue.popularity(row), rank, "popular")
            for rank, (item_id, row) in enumerate(named[: query.k], start=1)
        ]
        kind: UserKind = "anonymous" if query.user_id is None else "bucket"
        return self._reply(query, items, CoverageBlock(len(named), 0, 0, 0, [], kind), 0, trail)

    def _explained(
        self,
        item_id: str,
        row: int,
        score: float,
        rank: int,
        stage: Stage,
        stages: dict[str, Explanation] | UnsetType = UNSET,
    ) -> RankedItem:
        if row == UNKNOWN:
            return RankedItem(item_id, score, rank, stage, stages=stages)
        item = self._catalogue.item(row)
        return RankedItem(item_id, score, rank, stage, item.title, item.categories, stages)

    def _places(self, query: Query, found: Found, scores: Scores, chosen: Sequence[Place]) -> list[RankedItem]:
        indices = [place.candidate for place in chosen]
        named = zip(self._ids(query, found, indices), chosen, strict=True)
        if not query.explain:
            return [
                RankedItem(item_id, sigmoid(place.logit), rank, place.stage)
                for rank, (item_id, place) in enumerate(named, start=1)
            ]
        stages = [
            {name: Explanation(sigmoid(logit), rank) for name, (logit, rank) in of_stages.items()}
            for of_stages in explain(scores, indices)
        ]
        return [
            self._explained(
                item_id, int(found.rows[place.candidate]), sigmoid(place.logit), rank, place.stage, stages[rank - 1]
            )
            for rank, (item_id, place) in enumerate(named, start=1)
        ]

    def _ids(self, query: Query, found: Found, indices: Sequence[int]) -> list[str]:
        """Ids of some candidates: as the caller named them, or as the catalogue does."""
        if query.candidates is not None:
            return [query.candidates[index] for index in indices]
        return [self._catalogue.item(row).item_id for row in found.rows[indices].tolist()]

    def _reply(
        self, query: Query, items: list[RankedItem], coverage: CoverageBlock, watermark_ms: int, trail: Trail
    ) -> RecommendReply:
        assigned = trail.assignment
        trail.timing_ms["total"] = round((time.monotonic() - query.budget.start_s) * 1e3, 3)
        return RecommendReply(
            recommendation_id=self._signer.sign(
                assigned, generation=self._generation, shown_s=self._clock.now_us() // 1_000_000, request=query.nonce
            ),
            request_id=query.request_id,
            items=items,
            release=ReleaseBlock(assigned.release, assigned.arm, assigned.bucket_ppm, assigned.reason),
            versions=Versions(
                self._edge,
                self._rerank,
                self._generation,
                self._schema,
                watermark_ms,
                trail.engines.get("edge", UNSET),
                trail.engines.get("rerank", UNSET),
            ),
            degraded=Degraded(bool(trail.reasons), trail.reasons),
            coverage=coverage,
            timing_ms=trail.timing_ms,
        )
