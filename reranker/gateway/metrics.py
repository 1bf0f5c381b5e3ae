"""Every number the gateway counts, declared once; the help text says what to do when it moves.

Label values are closed sets: routes, stages, arms and reasons, never ids or paths somebody sent.
"""

from __future__ import annotations

from functools import cache

from infra.metrics import counter, gauge, latency, sizes

REQUESTS = counter(
    "gateway_requests_total",
    "Answers by route, HTTP status and arm. Many 5xx: look at gateway_shed_total, then at /readyz.",
    ("route", "status", "arm"),
)
SECONDS = latency(
    "gateway_request_seconds",
    "From the first byte read to the reply ready. When it grows, compare gateway_stage_seconds.",
    ("route", "arm"),
)
STAGE_SECONDS = latency(
    "gateway_stage_seconds",
    "Time a request spent in one stage, failed ones included. Names the tier to scale or to look at.",
    ("stage", "arm"),
)
DEGRADED = counter(
    "gateway_degraded_total",
    "Answers given without a stage. Any lasting growth is an incident of that tier: see /v1/status.",
    ("reason", "arm"),
)
STAGE_FAILURES = counter(
    "gateway_stage_failures_total",
    "Why a stage gave nothing: late, gone, overloaded, failed, not_finite.",
    ("stage", "cause"),
)
RETRIES = counter(
    "gateway_retried_calls_total",
    "Calls made again because the peer died during them. Grows only when replicas die.",
    ("stage",),
)
SHED = counter("gateway_shed_total", "Requests refused because the gateway was full. Add gateways or replicas.")
IN_FLIGHT = gauge("gateway_in_flight", "Requests being answered now.", mode="livesum")
CANDIDATES = sizes("gateway_candidates", "Candidates ranked per request.")
DUPLICATES = counter(
    "gateway_duplicate_candidates_total", "Candidates a request named twice; the caller repeats itself."
)
MISSING_ROWS = counter(
    "gateway_missing_rows_total",
    "Candidates ranked with the default row. Much of it: the caller's items are not in this release.",
    ("arm",),
)
UNNAMED = counter(
    "gateway_unnamed_items_total",
    "Recalled items without an id in the catalogue or the registry, left out. Publish the item with its row.",
)
INTERNAL_ERRORS = counter(
    "gateway_internal_errors_total", "Requests answered with popular items because of a bug; the log has the trace."
)
IMPRESSIONS = counter(
    "gateway_impressions_total",
    "Impressions (replies with items) by outcome. dropped: the queue was full or the log away; only counts suffer.",
    ("outcome",),
)
FEEDBACK = counter(
    "gateway_feedback_events_total",
    "Feedback events by outcome. unacknowledged: the broker did not answer in time, the caller was told.",
    ("outcome",),
)
SHADOW = counter(
    "gateway_shadow_total",
    "Copies of requests for the candidate release by outcome. scored: compared with what was shown. busy, full: "
    "dropped because answers came first; much of it: ask for a smaller share. over: the plan changed. failed: a bug, "
    "see the log.",
    ("outcome",),
)
ATTRIBUTED = counter(
    "gateway_attributed_events_total",
    "Feedback events by the arm that showed their item. none: without a recommendation id; unknown: with one that is "
    "not ours, or forged. Much of either: callers do not send back the id, and gates on events stay inconclusive.",
    ("arm",),
)

# A child per label value, looked up once: `labels` costs more than counting does.
stage_seconds = cache(STAGE_SECONDS.labels)
missing_rows = cache(MISSING_ROWS.labels)
