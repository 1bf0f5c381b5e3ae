"""The feed is bounded by bytes and keeps order."""

from __future__ import annotations

import threading

from param_server.contract import BadRecord
from param_server.feed import Feed, LogChange
from param_server.updates import StreamRecord
from tests.support import eventually
from tests.unit.param_server.support import Op, a_batch, a_record


def test_items_come_out_in_order() -> None:
    feed = Feed(10_000)
    items = [LogChange("a"), a_record(a_batch([1])), StreamRecord(0, 1, b"", BadRecord("crc", ""))]
    assert all(feed.put(item) for item in items)
    assert [feed.take() for _ in range(3)] == items
    assert feed.take() is None


def test_a_full_feed_holds_the_writer_until_something_is_taken() -> None:
    feed = Feed(100)
    assert feed.put(a_record(a_batch([1, 2]), offset=0))
    writer = threading.Thread(target=feed.put, args=(a_record(a_batch([3]), offset=1),))
    writer.start()
    assert eventually(lambda: feed._changed._waiters)  # type: ignore[attr-defined]
    assert feed.take() is not None
    writer.join(60)
    second = feed.take()
    assert isinstance(second, StreamRecord)
    assert second.offset == 1


def test_a_record_larger_than_the_bound_still_goes_through() -> None:
    assert Feed(1).put(a_record(a_batch([1, 2, 3])))


def test_closing_lets_a_waiting_writer_go() -> None:
    feed = Feed(1)
    feed.put(LogChange("a"))
    results: list[int] = []
    writer = threading.Thread(target=lambda: results.append(feed.put(LogChange("b"))))
    writer.start()
    feed.close()
    writer.join(60)
    assert results == [0]


def test_a_run_is_what_may_be_applied_together_up_to_a_number_of_rows() -> None:
    feed = Feed(1 << 20)
    for offset, op in enumerate([Op.ASSIGN, Op.ASSIGN, Op.ASSIGN, Op.ADD, Op.ADD]):
        assert feed.put(a_record(a_batch([1, 2], op=op), offset=offset)) == offset + 1
    feed.put(LogChange("a"))
    runs = [feed.take_run(4) for _ in range(5)]
    sizes = [[record.offset for record in run] if isinstance(run, list) else run for run in runs]
    assert sizes == [[0, 1], [2], [3, 4], LogChange("a"), None]


def test_what_was_taken_makes_room_again() -> None:
    feed = Feed(4000)
    for turn in range(50):
        assert feed.put(a_record(a_batch([1, 2, 3]), offset=turn))
        assert feed.take_run(100) is not None
