"""What one shard is told: where it stands, what it talks to, how it keeps and divides its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from param_server.keeper import Keeping
from param_server.tiering import Tiering


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Where one shard stands and what it talks to. All shards of a stack share `snapshot_root`,
    those of releases side by side `image_root` too; None: every table is in memory of its process alone.

    Of the replicas of a shard only the first (`replica` 0) writes snapshots and dead letters.
    """

    index: int
    n_shards: int
    n_partitions: int
    name: str
    bind: str
    snapshot_root: Path
    bootstrap: str
    topic: str
    deadletter_topic: str
    image_root: Path | None = None
    snapshots: Keeping = field(default_factory=Keeping)
    table_headroom: float = 2.0
    table_min_capacity_rows: int = 65536
    apply_budget_s: float = 0.002
    copy_budget_s: float = 0.001
    feed_bytes: int = 128 * 1024 * 1024
    max_batch: int = 64
    max_queue: int = 1024
    tiers: Tiering | None = None
    replica: int = 0

    @property
    def room(self) -> dict[str, Any]:
        """How large tables are made: `headroom` over the rows of the release, and `min_capacity_rows`."""
        return {"headroom": self.table_headroom, "min_capacity_rows": self.table_min_capacity_rows}
