"""What a reply and a feedback event add to the figures of the gray release. Pure but for the counters."""

from __future__ import annotations

import time
from collections.abc import Iterable

from reranker.gateway.metrics import ATTRIBUTED
from reranker.gateway.query import Query
from reranker.gateway.schemas import FeedbackItem, RecommendReply
from reranker.gray.attribution import Signer
from reranker.gray.tally import Outcome, Sight, Tally

INTERNAL = "internal"


def outcome_of(query: Query, reply: RecommendReply, took_s: float) -> Outcome:
    """What one reply says about the release that gave it."""
    coverage = reply.coverage
    return Outcome(
        took_ms=took_s * 1e3,
        failed=INTERNAL in reply.degraded.reasons,
        late=took_s > query.budget.total_s,
        degraded=reply.degraded.value,
        candidates=coverage.candidates,
        missing_rows=coverage.missing,
        cold=coverage.user != "known",
        shown=len(reply.items),
    )


def sight_of(reply: RecommendReply) -> Sight:
    """What one reply showed. Scores of an answer without a stage are another model's, and count as none."""
    watermark_ms = reply.versions.watermark_ms
    return Sight(
        items=[item.item_id for item in reply.items],
        scores=[] if reply.degraded.value else [item.score for item in reply.items],
        age_s=time.time() - watermark_ms / 1e3 if watermark_ms else None,
    )


def attribute(items: Iterable[FeedbackItem], signer: Signer, tally: Tally) -> None:
    """Count events for the arm that showed their item. One without a recommendation id of ours counts for no arm."""
    for item in items:
        shown = signer.read(item.recommendation_id)
        if shown is None:
            ATTRIBUTED.labels("none" if item.recommendation_id is None else "unknown").inc()
            continue
        tally.happened(shown, item.event)
        ATTRIBUTED.labels(shown.arm).inc()
