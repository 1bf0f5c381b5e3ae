"""Reading the stream for people, for `trirank updates tail` and `deadletters`. Applies and commits nothing."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from infra.kafka import LogConsumer
from infra.log import LogGap, Record

_POLL_S = 0.25
# The first answer of an idle broker may take one of its waits.
_FIRST_S = 2.0
_SHOWN_KEYS = 4


def records(
    bootstrap: str, topic: str, n_partitions: int, *, last: int | None, follow: bool, limit: int | None = None
) -> Iterator[Record]:
    """The last `last` records of each partition (None: all), then, with `follow`, those that come; at most `limit`.

    Raises LogUnavailable.
    """
    consumer = LogConsumer(bootstrap, topic, range(n_partitions), positions={})
    consumer.start()
    try:
        ends = _go_back(consumer, last)
        given = 0
        while limit is None or given < limit:
            for record in _poll(consumer):
                if limit is None or given < limit:
                    given += 1
                    yield record
            positions = consumer.positions()
            if not follow and all(positions[p] >= end for p, end in ends.items()):
                return
    finally:
        consumer.close()


def _go_back(consumer: LogConsumer, last: int | None) -> dict[int, int]:
    """Move each partition back from its end; the ends."""
    first = consumer.earliest()
    for partition, offset in first.items():
        consumer.seek(partition, offset)
    end_s = time.monotonic() + _FIRST_S
    while consumer.highwater().keys() != first.keys() and time.monotonic() < end_s:
        _poll(consumer)
    ends = {p: consumer.highwater().get(p, offset) for p, offset in first.items()}
    for partition, offset in first.items():
        consumer.seek(partition, offset if last is None else max(offset, ends[partition] - last))
    return ends


def _poll(consumer: LogConsumer) -> list[Record]:
    try:
        return consumer.poll(_POLL_S)
    except LogGap as gap:
        # Somebody who only looks goes on with what there is.
        consumer.seek(gap.partition, gap.resume_at)
        return []


def about_update(record: Record, table_names: dict[int, str]) -> dict[str, Any]:
    """What a record of the embeddings topic says."""
    from param_server.contract import BadRecord, decode_batch

    about: dict[str, Any] = {"partition": record.partition, "offset": record.offset}
    try:
        batch = decode_batch(record.value)
    except BadRecord as error:
        return about | {"bad": error.reason, "detail": error.detail, "bytes": len(record.value)}
    return about | {
        "time": _time(batch.event_time_us),
        "op": batch.op.name.lower(),
        "table": table_names.get(batch.table_id, batch.table_id),
        "generation": batch.generation,
        "dim": batch.dim,
        "rows": int(batch.keys.size),
        "order": "row versions" if batch.versions is not None else batch.base_version or "log",
        "keys": batch.keys[:_SHOWN_KEYS].tolist(),
    }


def about_letter(record: Record) -> dict[str, Any]:
    """What a dead letter says: why, where the record was, how many were only counted before it."""
    try:
        key: Any = msgspec.json.decode(record.key or b"")
    except msgspec.DecodeError:
        key = None
    known = key if isinstance(key, dict) else {"reason": "unknown", "detail": "the letter carries no reason"}
    return {"letter": record.offset, "time": _time(record.timestamp_ms * 1000), **known, "bytes": len(record.value)}


def update_line(about: dict[str, Any]) -> str:
    """One line for people."""
    place = f"{about['partition']}:{about['offset']}"
    if "bad" in about:
        return f"{place:<12} bad record ({about['bad']}): {about['detail']}, {about['bytes']} bytes"
    keys = " ".join(map(str, about["keys"])) + (" ..." if about["rows"] > len(about["keys"]) else "")
    return (
        f"{place:<12} {about['time']}  {about['op']:<6} {about['table']:<14} {about['rows']:>6} rows of {about['dim']}"
        f"  order {about['order']}  keys {keys}"
    )


def letter_line(about: dict[str, Any]) -> str:
    """One line for people."""
    left_out = f"  ({about['skipped']} left out before it)" if about.get("skipped") else ""
    place = f"{about.get('topic', '?')} {about.get('partition', '?')}:{about.get('offset', '?')}"
    return f"{about['time']}  {about['reason']:<12} {place}  {about['detail']}, {about['bytes']} bytes{left_out}"


def show(about: Iterator[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, as_json: bool) -> int:
    """Print one record per line; how many."""
    shown = 0
    for entry in about:
        print(json.dumps(entry) if as_json else line(entry), flush=True)
        shown += 1
    return shown


def _time(time_us: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(time_us / 1e6, datetime.UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(time_us)
