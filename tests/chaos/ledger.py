"""What the tables must hold, worked out apart from the product: the log read and folded with a dictionary.

Uses nothing of the product but its numbers: it reads with kafka-python itself and takes records apart with `struct`.
Ordering: rows of `versioned` keys are those of the greatest version, all others those of the last record of the log.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.kafka_client import kafka, open_client

_HEADER = struct.Struct("<4sHHIIBBHIQqI")
_ASSIGN, _ADD, _DELETE = 1, 2, 3

Row = tuple[float, ...]


@dataclass
class Ledger:
    """`first` are the rows before the first record. `read` goes on from where it was."""

    bootstrap: str
    topic: str
    n_partitions: int
    first: Mapping[int, Row]
    acknowledged: dict[int, Counter[int]] = field(default_factory=dict)
    unsure: dict[int, Counter[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows: dict[int, Row] = dict(self.first)
        self._versions = dict.fromkeys(self.first, 1)
        self._written: dict[int, Counter[int]] = {}
        self.ends = dict.fromkeys(range(self.n_partitions), 0)

    def rows(self) -> dict[int, Row]:
        """Every live row."""
        return dict(self._rows)

    def ever(self) -> list[int]:
        """Every key a record named, and those of the start."""
        return sorted(set(self.first) | {key for keys in self._written.values() for key in keys})

    def read(self, timeout_s: float = 60.0) -> None:
        """Read to the end of the log and check that each acknowledged record is there once, and no record twice.

        A record is known by its event time, which the writers make unique. Nobody may be writing.
        """
        end_s = time.monotonic() + timeout_s
        with open_client(
            kafka.KafkaConsumer, self.bootstrap, 30.0, enable_auto_commit=False, auto_offset_reset="earliest",
            max_partition_fetch_bytes=16 << 20, fetch_max_wait_ms=1000,
        ) as consumer:  # fmt: skip
            places = [kafka.TopicPartition(self.topic, p) for p in range(self.n_partitions)]
            consumer.assign(places)
            for place in places:
                consumer.seek(place, self.ends[place.partition])
            while self._missing() or not all(self._at_end(consumer, place) for place in places):
                assert time.monotonic() < end_s, f"acknowledged and not in the log: {self._missing()}"
                for place, records in consumer.poll(timeout_ms=200).items():
                    for record in records:
                        assert record.offset == self.ends[place.partition]
                        self.ends[place.partition] = record.offset + 1
                        self._fold(record.value)
        for known, keys in self._written.items():
            promised = self.acknowledged.get(known)
            assert keys == promised if promised else not keys - self.unsure[known], f"record {known} is there twice"

    def _at_end(self, consumer: kafka.KafkaConsumer, place: kafka.TopicPartition) -> bool:
        return consumer.highwater(place) == self.ends[place.partition]

    def _missing(self) -> list[int]:
        return [known for known, keys in self.acknowledged.items() if keys - self._written.get(known, Counter())]

    def _fold(self, value: bytes) -> None:
        magic, _, op, _, _, _, flags, dim, n, base, time_us, _ = _HEADER.unpack_from(value)
        assert magic == b"EMBU"
        keys = struct.unpack_from(f"<{n}q", value, _HEADER.size)
        versions: Sequence[int] | None = struct.unpack_from(f"<{n}Q", value, _HEADER.size + 8 * n) if flags else None
        flat = struct.unpack_from(f"<{n * dim}f", value, len(value) - 4 * n * dim) if op != _DELETE else ()
        assert base == 0
        self._written.setdefault(time_us, Counter()).update(keys)
        for i, key in enumerate(keys):
            self._one(op, key, flat[i * dim : (i + 1) * dim], None if versions is None else versions[i])

    def _one(self, op: int, key: int, row: Row, version: int | None) -> None:
        if version is not None:
            if version <= self._versions.get(key, -1):
                return
            self._versions[key] = version
        if op == _DELETE:
            self._rows.pop(key, None)
        elif op == _ASSIGN:
            self._rows[key] = row
        else:
            assert op == _ADD
            before = self._rows.get(key, (0.0,) * len(row))
            self._rows[key] = tuple(a + b for a, b in zip(before, row, strict=True))
