"""Metrics of the engines in a replica. Labels are closed: roles, and engine names of `infra.engine.names`."""

from __future__ import annotations

from functools import cache

from infra.metrics import counter, gauge, latency

SERVING = gauge(
    "engine_serving",
    "Replicas that answer with this engine now. Another engine than you built for: engine_refused_total and the "
    "`engines_refused` of `trirank status` say why.",
    ("role", "engine"),
    mode="livesum",
)
RUN_SECONDS = latency(
    "engine_run_seconds",
    "Time of one run of one padded batch. Compare engines; `trirank bench models` has the same per shape.",
    ("role", "engine"),
)
REFUSED = counter(
    "engine_refused_total",
    "Engines not served by a replica that started or tried again. unavailable: not for this machine, or not built; "
    "damaged: the file is; disagrees: its scores are not the recorded ones; failed: it raised. The log has the reason.",
    ("role", "engine", "cause"),
)
FAILURES = counter(
    "engine_failures_total",
    "Runs of a serving engine that raised or gave scores that are not finite, while another engine answered. "
    "Anything lasting: read the replica's log and rebuild that engine.",
    ("role", "engine", "cause"),
)
RESCUED = counter(
    "engine_rescued_requests_total",
    "Requests answered by the next engine because the first one failed. They cost a second run; none was lost.",
    ("role",),
)
FAULTS = counter(
    "engine_keeper_faults_total",
    "Looks after the engines that failed by themselves: a bug. The engines in rotation go on; fallen ones are tried "
    "again a second later. The replica's log has the trace.",
    ("role",),
)
TRIPPED = counter(
    "engine_tripped_total",
    "Times an engine was taken out of service. It is tried again after a growing pause, with the recorded requests.",
    ("role", "engine"),
)
CELLS = counter(
    "engine_cells_total",
    "Cells (history tokens x candidates) of the batches that ran, by kind; padding is also what a GPU's bucket has "
    "beyond its batch. padding / (real + padding) is the waste; it stays below 0.3, and grows when callers send "
    "histories and candidate lists of very mixed lengths.",
    ("role", "kind"),
)

# A child per label value, looked up once: `labels` costs more than counting does.
run_seconds = cache(RUN_SECONDS.labels)
cells = cache(CELLS.labels)
