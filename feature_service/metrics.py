"""Metrics of tier 2. Names are `feature_service_<thing>_<unit>`; each help text says what to do when it moves."""

from __future__ import annotations

from infra.metrics import counter, gauge, latency

HISTORY_READS = counter(
    "feature_service_history_reads_total",
    "Histories asked for. 'missing' growing: Redis is away or late, look at it; 'empty' growing: many new users, or "
    "the feedback loop stands still.",
    ["result"],
)
EVENTS = counter(
    "feature_service_events_total",
    "Feedback events applied, by kind ('history' entered a history, 'impression' was counted). Standing still while "
    "/v1/feedback answers 202: the events actor or Redis is away.",
    ["kind"],
)
EVENT_AGE_SECONDS = latency(
    "feature_service_event_age_seconds",
    "Accepted by the log until in Redis, per batch. Growing: more feedback than one loop applies, or Redis is slow.",
)
LOG_LAG = gauge(
    "feature_service_log_lag_records",
    "Feedback records not applied yet. Only growing: look at the events actor's log.",
)
LOG_GAPS = counter(
    "feature_service_log_gaps_total",
    "Partitions whose feedback was lost before it was applied ('lost': the broker lost its log; 'truncated': retention "
    "was shorter than the outage).",
    ["kind"],
)
DEAD_LETTERS = counter(
    "feature_service_dead_letters_total",
    "Feedback records nobody could read. Look into the dead-letter topic for the producer that writes them.",
    ["reason"],
)
FAILURES = counter(
    "feature_service_loop_failures_total",
    "Rounds of the feedback loop that failed and were tried again. 'redis' and 'log' end with the outage; 'unexpected' "
    "is a defect, see the log.",
    ["cause"],
)
