"""What one gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass

from reranker.gray.arms import LEASE_S


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Plain values only, because Ray starts the gateway somewhere else; paths are absolute.

    `attribution_key` signs recommendation ids and is the same for all gateways of a stack, also after a restart.
    `control_token` is what callers who change the gray release must show; None: nobody may.
    """

    host: str
    port: int
    release_dir: str
    stack: str
    redis_url: str
    kafka: str
    embedded_redis: bool
    embedded_kafka: bool
    feedback_topic: str
    shards: int
    partitions: int
    recall_k: int
    rerank_depth: int
    deadline_ms: float
    max_in_flight: int
    gray_lease_s: float = LEASE_S
    log_level: str = "INFO"
    attribution_key: bytes = b""
    control_token: str | None = None
