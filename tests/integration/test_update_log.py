"""What `trirank updates tail` and `deadletters` show of a real log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from infra.commands.update_log import about_letter, about_update, letter_line, records, update_line
from infra.embedded import EmbeddedBroker
from infra.kafka import LogProducer
from param_server.contract import Op, UpdateBatch, encode_batch
from tests.integration.shards import N_PARTITIONS, Topics


def an_update(n: int, *, base_version: int = 0) -> bytes:
    keys, rows = np.arange(n, dtype=np.int64), np.ones((n, 2), np.float32)
    return encode_batch(UpdateBatch(Op.ASSIGN, 4, 7, 2, base_version, 1_700_000_000_000_000, keys, None, rows))


def send(broker: EmbeddedBroker, topic: str, partition: int, *values: bytes, key: bytes | None = None) -> None:
    producer = LogProducer(broker.bootstrap)
    producer.start()
    try:
        for value in values:
            producer.send(topic, partition, value, key).result(10)
    finally:
        producer.close()


def test_the_tail_shows_the_last_records_of_each_partition(broker: EmbeddedBroker, topics: Topics) -> None:
    send(broker, topics.embeddings, 0, *(an_update(n) for n in range(1, 6)))
    send(broker, topics.embeddings, 2, an_update(9, base_version=77), b"junk")
    found = records(broker.bootstrap, topics.embeddings, N_PARTITIONS, last=2, follow=False)
    about = sorted((about_update(record, {4: "item"}) for record in found), key=lambda a: (a["partition"], a["offset"]))
    places = [(a["partition"], a["offset"], a.get("rows")) for a in about]
    assert places == [(0, 3, 4), (0, 4, 5), (2, 0, 9), (2, 1, None)]
    assert about[1] == {
        "partition": 0, "offset": 4, "time": "2023-11-14T22:13:20.000+00:00", "op": "assign", "table": "item",
        "generation": 7, "dim": 2, "rows": 5, "order": "log", "keys": [0, 1, 2, 3],
    }  # fmt: skip
    assert about[2]["order"] == 77
    assert update_line(about[1]).startswith("0:4          2023-11-14T22:13:20.000+00:00  assign item")
    assert update_line(about[1]).endswith("5 rows of 2  order log  keys 0 1 2 3 ...")
    assert "bad record (truncated)" in update_line(about[3])


def test_everything_is_shown_from_where_the_log_begins(broker: EmbeddedBroker, topics: Topics) -> None:
    send(broker, topics.embeddings, 1, *(an_update(n) for n in range(1, 31)))
    found = records(broker.bootstrap, topics.embeddings, N_PARTITIONS, last=None, follow=False)
    assert [record.offset for record in found] == list(range(30))


def test_following_goes_on_until_the_limit(broker: EmbeddedBroker, topics: Topics) -> None:
    send(broker, topics.embeddings, 1, an_update(1))
    found = records(broker.bootstrap, topics.embeddings, N_PARTITIONS, last=1, follow=True, limit=2)
    assert next(found).offset == 0
    send(broker, topics.embeddings, 3, an_update(2))
    assert [record.partition for record in found] == [3]


def test_an_empty_log_ends_at_once(broker: EmbeddedBroker, topics: Topics) -> None:
    assert list(records(broker.bootstrap, topics.embeddings, N_PARTITIONS, last=5, follow=False)) == []


def test_a_letter_shows_why_and_where(broker: EmbeddedBroker, topics: Topics) -> None:
    why = {"reason": "crc", "detail": "the checksum differs", "topic": "t", "partition": 3, "offset": 17, "skipped": 5}
    send(broker, topics.deadletter, 0, b"bytes", key=json.dumps(why).encode())
    send(broker, topics.deadletter, 0, b"stranger")
    first, second = (about_letter(r) for r in records(broker.bootstrap, topics.deadletter, 1, last=10, follow=False))
    assert {name: first[name] for name in why} == why
    assert letter_line(first).endswith("crc          t 3:17  the checksum differs, 5 bytes  (5 left out before it)")
    assert (second["reason"], second["bytes"]) == ("unknown", 8)
    assert "unknown" in letter_line(second)


def test_times_no_calendar_has_are_shown_as_numbers(tmp_path: Path) -> None:
    from infra.log import Record

    batch = UpdateBatch(Op.DELETE, 4, 7, 2, 0, 2**63 - 1, np.array([1]), None, np.empty((0, 2), np.float32))
    assert about_update(Record(0, 0, 0, None, encode_batch(batch)), {})["time"] == str(2**63 - 1)
