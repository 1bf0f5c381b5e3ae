"""Metrics of the data plane; `role` is the role of the serving side (shard, edge, rerank...)."""

from __future__ import annotations

from infra.metrics import counter, latency, sizes

CALLS = counter(
    "wire_calls_total",
    "Calls made, by outcome. deadline growing: the tier is too slow, add replicas; gone: its processes die, read their "
    "logs; overloaded: add replicas or admit less; failed: read the log of the serving process.",
    ("role", "outcome"),
)
CALL_SECONDS = latency(
    "wire_call_seconds",
    "Time of an answered call as the caller sees it. When it grows and wire_batch_size grows too, the tier is "
    "saturated: add replicas. When only this grows, the machine is short of cores.",
    ("role",),
)
LATE_REPLIES = counter(
    "wire_late_replies_total",
    "Answers that came after their caller had left. Growing: deadlines are shorter than the tier needs; raise "
    "deadline_ms or add replicas.",
    ("role",),
)
PEER_DEATHS = counter(
    "wire_peer_deaths_total",
    "Connections lost to a peer in use. More than restarts explain: look for crashes or the out-of-memory killer.",
    ("role",),
)
PEERS_REFUSED = counter(
    "wire_peers_refused_total",
    "Peers not used: another protocol or release than the directory says, or no CURVE keys. The log says why.",
    ("role",),
)
SERVED = counter(
    "wire_served_total",
    "Requests answered by a server, by outcome. failed growing: read this process's log; expired: callers give less "
    "time than the queue takes, add replicas.",
    ("role", "outcome"),
)
REFUSED = counter(
    "wire_refused_total",
    "Requests refused at once because the queue was full. Growing: add replicas, or admit less at the gateway.",
    ("role",),
)
MALFORMED = counter(
    "wire_malformed_total",
    "Messages that were not ours. Anything but zero: something else talks to this address, or versions are mixed.",
    ("role",),
)
BATCH_SIZE = sizes(
    "wire_batch_size",
    "Requests that ran as one batch. At the largest batch all the time: the tier is saturated, add replicas.",
    ("role",),
)
LOOP_FAILURES = counter(
    "wire_loop_failures_total",
    "Errors in a server loop outside any one request. Anything but zero is a defect; the log has the traceback.",
    ("role",),
)
