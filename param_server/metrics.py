"""Metrics of tier 1. Names are `param_server_<thing>_<unit>`; each help text says what to do when it moves."""

from __future__ import annotations

from infra.metrics import counter, gauge, latency, sizes

LOOKUP_ROWS = counter(
    "param_server_lookup_rows_total",
    "Rows asked for. A growing share of 'missing' means keys nobody trained: look at the catalogue and the stream.",
    ["found"],
)
HANDLE_SECONDS = latency(
    "param_server_handle_seconds",
    "Time to answer one batch of requests. When it grows with the batch, add shards.",
)
HANDLE_REQUESTS = sizes(
    "param_server_handle_requests",
    "Requests answered together. Steadily above 8: the shard is the bottleneck, add shards.",
)
APPLY_SECONDS = latency(
    "param_server_apply_seconds",
    "How long one stretch of applying held up lookups. Above 10 ms: producers send too many rows in one record.",
)
UPDATE_ROWS = counter(
    "param_server_update_rows_total",
    "Rows of the stream. 'stale' is harmless after a restart, else two producers write one key; "
    "'refused' rows are in the dead-letter topic.",
    ["result"],
)
UPDATE_AGE_SECONDS = latency(
    "param_server_update_age_seconds",
    "Event time to visible, per record. When it grows, look at param_server_log_lag_records.",
)
DEAD_LETTERS = counter(
    "param_server_dead_letters_total",
    "Records that could not be applied. Read the dead-letter topic; 'table_full' asks for more table_headroom.",
    ["reason"],
)
DEAD_LETTERS_SKIPPED = counter(
    "param_server_dead_letters_skipped_total",
    "Refused records that were only counted, for want of room in the limit. Stop the producer that sends them.",
    ["reason"],
)
LOG_GAPS = counter(
    "param_server_log_gaps_total",
    "Partitions whose log was lost, or cut off before it was applied. The lost updates must be published again.",
    ["kind"],
)
LOG_FAILURES = counter(
    "param_server_log_failures_total",
    "Looks at the log that failed and were tried again. 'unavailable' ends with the outage; 'unexpected' is a defect, "
    "see the shard's log.",
    ["cause"],
)
LOG_LAG = gauge(
    "param_server_log_lag_records",
    "Records not applied yet. When it only grows, producers are faster than this shard: add shards.",
    ["shard"],
)
WATERMARK = gauge(
    "param_server_watermark_seconds",
    "Event time up to which the stream is applied, seconds since 1970. When it stands still, look at Kafka.",
    ["shard"],
)
STALENESS = gauge(
    "param_server_staleness_seconds",
    "How long updates have been waiting; 0 while all of the log is applied. When it grows, look at lag and Kafka.",
    ["shard"],
)
TABLE_ROWS = gauge(
    "param_server_table_rows",
    "Live rows per table. Near capacity, updates of new keys are refused: raise table_headroom.",
    ["shard", "table"],
)
TABLE_BYTES = gauge(
    "param_server_table_bytes",
    "Memory of a table: 'shared' is in an image that other shard processes on the host may use too, 'private' is this "
    "process's. 'shared' is 0 where there is no image: the shard's health says why. 'private' grows as rows change.",
    ["shard", "table", "kind"],
)
SNAPSHOT_SECONDS = latency(
    "param_server_snapshot_seconds",
    "Time to write one snapshot, beside serving. When it nears snapshot_interval_s, raise that.",
)
SNAPSHOT_SLICE_SECONDS = latency(
    "param_server_snapshot_slice_seconds",
    "How long one slice of copying held up lookups. Above 5 ms: the machine is short of memory bandwidth.",
)
SNAPSHOT_FAILURES = counter(
    "param_server_snapshot_failures_total",
    "Snapshots that could not be written; a restart then replays more. Look at the disk.",
)
CLIENT_MISSING = counter(
    "param_server_client_missing_shards_total",
    "Calls answered with default rows because a shard was gone, late or full. Look at the shard's log.",
    ["cause"],
)
TIER_ROWS = counter(
    "param_server_tier_lookup_rows_total",
    "Rows asked for, by the tier that answered. When 'missing' grows, more is wanted than fits: raise tier_hot_bytes.",
    ["tier"],
)
TIER_MOVES = counter(
    "param_server_tier_moved_rows_total",
    "Rows that changed tier. 'stored' near the rate of updates: the tiers above are too small for what is written.",
    ["move"],
)
TIER_FILLS = counter(
    "param_server_tier_fills_total",
    "Reads of the cold tier, by outcome. 'failed': Redis is away; 'late': an update came first, which is fine.",
    ["outcome"],
)
TIER_LEAVING = gauge(
    "param_server_tier_leaving_rows",
    "Rows that wait for the cold tier to acknowledge them. When it stays high, Redis is away or too slow; the stream "
    "waits at tier_leaving_rows.",
    ["shard"],
)
COLD_SECONDS = latency(
    "param_server_cold_seconds",
    "Time of one batch read from or written to the cold tier. When it grows, look at Redis.",
    ["what"],
)
COLD_FAULTS = counter(
    "param_server_cold_faults_total",
    "Reads and writes of the cold tier that failed although Redis answers: a bug. The shard's log has the trace.",
    ["what"],
)
COLD_FAILURES = counter(
    "param_server_cold_failures_total",
    "Calls of the cold tier that failed. Lookups go on without it; look at Redis.",
)
