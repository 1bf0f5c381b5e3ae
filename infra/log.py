"""What a log and its readers have in common: records, what is needed of a connection, the ways a log can fail.

Knows no Kafka. `log_reader.py` sees to it that no failure goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from infra.errors import Permanent

TIMEOUT_S = 3.0
# Cluster ids of brokers that keep their log in memory: the embedded one, and that program's own default.
MEMORY_CLUSTER_PREFIXES = ("trirank-memory-", "tansu")


@dataclass(frozen=True, slots=True)
class Record:
    """One record as the log holds it; a record without a value has an empty one."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """What a broker says of itself; `durable` is False for one that keeps its log in memory."""

    cluster_id: str
    version: str
    brokers: int
    durable: bool


class LogGap(Permanent):
    """The record at `position` is gone; `resume_at` is the first offset the log has now.

    Action: count it, say so, then seek to `resume_at` and make good what the lost records would have done.
    """

    def __init__(self, partition: int, position: int, resume_at: int, detail: str) -> None:
        super().__init__(f"partition {partition}: {detail} (position {position}, the log goes on at {resume_at})")
        self.partition = partition
        self.position = position
        self.resume_at = resume_at


class LogLost(LogGap):
    """A broker without a disk restarted, or the topic was deleted and made anew."""


class LogTruncated(LogGap):
    """The log has other records, not those at the position: retention or delete-records took them, or (on a broker
    that keeps its log in memory) they never came to be there."""


class OutOfRange(Permanent):
    """The broker refused the positions of these partitions."""

    def __init__(self, partitions: Collection[int]) -> None:
        super().__init__(f"out of range: partitions {sorted(partitions)}")
        self.partitions = set(partitions)


class LogLink(Protocol):
    """A connection that reads partitions of one topic. May raise LogUnavailable."""

    def fetch(self, timeout_s: float, max_records: int) -> dict[int, list[Record]]:
        """Records per partition from the positions on; raises OutOfRange."""

    def seek(self, partition: int, offset: int) -> None:
        """Set a position and forget the partition's highwater."""

    def position(self, partition: int) -> int:
        """Offset of the next record that will be fetched."""

    def highwater(self, partition: int) -> int | None:
        """Offset after the newest record as of the last fetch."""

    def earliest(self, timeout_s: float) -> dict[int, int]:
        """First offset of each partition."""

    def identity(self) -> str | None:
        """Name of this very log as last heard; None while unknown."""

    def refresh_identity(self, timeout_s: float) -> bool:
        """Ask for the identity again; False when it was not answered."""

    def connections(self) -> list[object]:
        """The connections that stand."""

    def hold_fetches(self, wait_ms: int) -> None:
        """Let the broker hold an empty fetch this long."""

    def close(self) -> None:
        """End the connection."""


def is_durable(cluster_id: str | None) -> bool:
    """Whether a broker with this cluster id (or the identity of a log on it) keeps what it acknowledged."""
    return not (cluster_id or "").startswith(MEMORY_CLUSTER_PREFIXES)
