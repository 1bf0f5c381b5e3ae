"""Records on their way to a log: bounds, settlement, replacement of a broken connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from infra.errors import LogUnavailable, Overloaded, Permanent, TrirankError
from infra.outbox import Outbox, Outgoing
from tests.support import eventually


class Link:
    """A connection that settles when told to."""

    def __init__(self) -> None:
        self.handed: list[tuple[Outgoing, Callable[[int | TrirankError], None]]] = []
        self.is_broken = False
        self.closed = False

    def send(self, record: Outgoing, settle: Callable[[int | TrirankError], None]) -> None:
        if record.value == b"no":
            raise Permanent("log: never")
        if record.value == b"odd":
            raise ZeroDivisionError
        self.handed.append((record, settle))

    def broken(self) -> bool:
        return self.is_broken

    def close(self, timeout_s: float) -> None:
        self.closed = True
        for record, settle in self.handed:
            if not record.future.done():
                settle(LogUnavailable("log: closed"))


class Box(Outbox):
    """An outbox over such links; `away` makes connecting fail."""

    def __init__(self, **options: float) -> None:
        super().__init__("nowhere:1", **options)  # type: ignore[arg-type]
        self.links: list[Link] = []
        self.away = threading.Event()

    def _connect(self, timeout_s: float) -> Link:
        if self.away.is_set():
            raise LogUnavailable("log: away")
        self.links.append(Link())
        return self.links[-1]

    def settle(self, n: int) -> None:
        """Acknowledge n more records, in order."""
        eventually(lambda: self.links and len(self.links[-1].handed) >= n)
        for offset, (record, settle) in enumerate(self.links[-1].handed[:n]):
            if not record.future.done():
                settle(offset)


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box(max_pending=3, max_pending_bytes=10)
    made.start()
    yield made
    made.close(0.1)


def test_a_record_is_settled_with_the_offset_of_its_acknowledgement(box: Box) -> None:
    first, second = box.send("t", 0, b"a"), box.send("t", 0, b"b")
    assert not first.done()
    box.settle(2)
    assert (first.result(30), second.result(30)) == (0, 1)
    box.flush(1)
    assert box.pending() == 0


def test_more_records_or_bytes_than_allowed_are_refused_and_room_comes_back(box: Box) -> None:
    kept = [box.send("t", 0, b"a") for _ in range(3)]
    with pytest.raises(Overloaded):
        box.send("t", 0, b"d")
    box.settle(3)
    assert all(future.result(30) is not None for future in kept)
    box.send("t", 0, b"123456789")
    with pytest.raises(Overloaded):
        box.send("t", 0, b"12")


def test_a_record_larger_than_the_bound_passes_when_it_is_alone(box: Box) -> None:
    large = box.send("t", 0, bytes(100))
    box.settle(1)
    assert large.result(30) == 0


def test_a_sender_may_wait_for_room(box: Box) -> None:
    for _ in range(3):
        box.send("t", 0, b"a")
    threading.Thread(target=box.settle, args=(3,)).start()
    waited = box.send("t", 0, b"d", wait_s=30.0)
    box.settle(4)
    assert waited.result(30) == 3


def test_flush_says_when_not_everything_is_acknowledged_in_time(box: Box) -> None:
    box.send("t", 0, b"a")
    with pytest.raises(LogUnavailable, match="1 records are not acknowledged"):
        box.flush(0.01)


def test_a_record_the_log_never_takes_fails_alone(box: Box) -> None:
    bad, surprise, good = (box.send("t", 0, value) for value in (b"no", b"odd", b"a"))
    box.settle(1)
    assert good.result(30) == 0
    with pytest.raises(Permanent):
        bad.result(30)
    with pytest.raises(LogUnavailable):
        surprise.result(30)
    assert box.pending() == 0


def test_a_broken_connection_is_replaced_before_the_next_record(box: Box) -> None:
    first = box.send("t", 0, b"a")
    eventually(lambda: box.links and box.links[0].handed)
    box.links[0].is_broken = True
    box.send("t", 0, b"b")
    eventually(lambda: len(box.links) == 2 and box.links[1].handed)
    assert box.links[0].closed
    with pytest.raises(LogUnavailable):
        first.result(30)


def test_records_wait_for_a_broker_that_is_away_until_their_time_is_over() -> None:
    box = Box(delivery_timeout_s=2.0)
    box.away.set()
    box.start()
    lost = box.send("t", 0, b"a")
    with pytest.raises(LogUnavailable):
        lost.result(30)
    box.away.clear()
    kept = box.send("t", 0, b"b")
    box.settle(1)
    assert kept.result(30) == 0
    box.close()


def test_a_cancelled_record_that_was_not_handed_over_is_not_sent(box: Box) -> None:
    box.away.set()
    first, second = box.send("t", 0, b"a"), box.send("t", 0, b"b")
    assert second.cancel()
    box.away.clear()
    box.settle(1)
    first.result(30)
    eventually(lambda: box.pending() == 0)
    assert [record.value for record, _ in box.links[0].handed] == [b"a"]


def test_closing_fails_what_is_not_acknowledged_and_accepts_no_more(box: Box) -> None:
    pending = box.send("t", 0, b"a")
    box.close(0.05)
    box.close(0.05)
    with pytest.raises(LogUnavailable):
        pending.result(30)
    with pytest.raises(LogUnavailable, match="closed"):
        box.send("t", 0, b"b")
