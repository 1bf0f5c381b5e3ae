"""The reader's thread: order, gaps before the records behind them, and staying through failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY

from infra.errors import LogUnavailable
from infra.log import LogLost, LogTruncated, Record
from param_server.contract import BadRecord, encode_batch
from param_server.feed import Feed, FeedItem, Gap, LogChange
from param_server.stream import StreamReader
from param_server.updates import StreamRecord
from tests.support import eventually
from tests.unit.param_server.support import a_batch

Poll = Callable[["ScriptedLog"], list[Record]]


def a_log_record(offset: int, value: bytes | None = None) -> Record:
    return Record(0, offset, 0, None, encode_batch(a_batch([1])) if value is None else value)


def gives(*records: Record) -> Poll:
    return lambda log: list(records)


def fails(error: Exception, identity: str | None = None) -> Poll:
    def poll(log: ScriptedLog) -> list[Record]:
        log.identity = identity or log.identity
        raise error

    return poll


class ScriptedLog:
    """A log that does one thing per poll, then nothing."""

    def __init__(self, *script: Poll, starts: list[Exception] | None = None) -> None:
        self.script = list(script)
        self.starts = starts or []
        self.identity = "log"
        self.seeks: list[tuple[int, int]] = []
        self.closed = False

    def start(self) -> None:
        if self.starts:
            raise self.starts.pop(0)

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        return self.script.pop(0)(self) if self.script else []

    def seek(self, partition: int, offset: int) -> None:
        self.seeks.append((partition, offset))

    def highwater(self) -> dict[int, int]:
        return {0: 42}

    def connected(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@contextmanager
def reading(log: ScriptedLog) -> Iterator[tuple[StreamReader, list[FeedItem]]]:
    feed = Feed(10_000)
    items: list[FeedItem] = []

    def drain() -> None:
        while (item := feed.take()) is not None:
            items.append(item)

    reader = StreamReader(log, feed, drain)
    reader.start()
    try:
        yield reader, items
    finally:
        reader.stop()
    assert log.closed


def offsets(items: list[FeedItem]) -> list[int]:
    return [item.offset for item in items if isinstance(item, StreamRecord)]


def failures(cause: str) -> float:
    """How often looking at the log has failed in this process so far."""
    return REGISTRY.get_sample_value("param_server_log_failures_total", {"cause": cause}) or 0.0


def test_records_arrive_in_order_behind_the_name_of_their_log() -> None:
    with reading(ScriptedLog(gives(a_log_record(0), a_log_record(1)), gives(a_log_record(2)))) as (reader, items):
        eventually(lambda: offsets(items) == [0, 1, 2])
        assert items[0] == LogChange("log")
        assert eventually(lambda: reader.highwater) == {0: 42}
        assert eventually(lambda: reader.connected)


def test_a_record_without_sense_or_value_is_handed_on_as_bad() -> None:
    nothing = Record(0, 1, 0, None, None)  # type: ignore[arg-type]
    with reading(ScriptedLog(gives(a_log_record(0, b"junk"), nothing))) as (_, items):
        eventually(lambda: offsets(items) == [0, 1])
    for item in items[1:]:
        assert isinstance(item, StreamRecord)
        assert isinstance(item.content, BadRecord)


def test_a_broker_that_is_away_at_start_is_tried_again() -> None:
    log, before = ScriptedLog(gives(a_log_record(0)), starts=[LogUnavailable("away")]), failures("unavailable")
    with reading(log) as (_, items):
        eventually(lambda: offsets(items) == [0])
    assert failures("unavailable") == before + 1


def test_all_gaps_are_told_together_before_the_records_behind_them() -> None:
    log = ScriptedLog(
        gives(a_log_record(7)),
        fails(LogLost(0, 8, 0, "lost"), identity="new"),
        fails(LogTruncated(1, 3, 5, "cut")),
        gives(a_log_record(0)),
    )
    with reading(log) as (_, items):
        eventually(lambda: offsets(items) == [7, 0])
    assert items[2] == LogChange("new", (Gap(0, 8, 0, lost=True), Gap(1, 3, 5, lost=False)))
    assert log.seeks == [(0, 0), (1, 5)]


def test_a_gap_is_not_forgotten_when_the_broker_fails_in_between() -> None:
    before = failures("unavailable")
    log = ScriptedLog(
        fails(LogLost(0, 8, 0, "lost"), identity="new"), fails(LogUnavailable("away")), gives(a_log_record(0))
    )
    with reading(log) as (_, items):
        eventually(lambda: offsets(items) == [0])
    assert failures("unavailable") == before + 1
    assert LogChange("new", (Gap(0, 8, 0, lost=True),)) in items


def test_an_unexpected_failure_is_survived_and_nothing_is_skipped() -> None:
    before = failures("unexpected")
    log = ScriptedLog(gives(a_log_record(0)), fails(RuntimeError("a bug")), gives(a_log_record(1)))
    with reading(log) as (_, items):
        eventually(lambda: offsets(items) == [0, 1])
    assert failures("unexpected") == before + 1
    assert (0, 1) in log.seeks
