"""The guarded reader's own rules; that it holds them on real brokers is tests/contract/test_log.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import LogUnavailable, Permanent
from infra.fetch_wait import fetch_wait_ms
from infra.log import LogLink, LogLost, LogTruncated, OutOfRange, Record, is_durable
from infra.log_reader import GuardedReader


class Log:
    """One partition 0 of a log in memory, as a link. A record that is None is not stored yet, and passed over."""

    def __init__(self) -> None:
        self.name = "trirank-memory-a/1"
        self.begin = 0
        self.records: list[bytes | None] = []
        self.at = 0
        self.connection: object | None = object()
        self.answers = True
        self.closed = 0
        self.wait_ms = 0

    def fetch(self, timeout_s: float, max_records: int) -> dict[int, list[Record]]:
        if self.at < self.begin:
            raise OutOfRange({0})
        there = [(i, v) for i, v in enumerate(self.records) if v is not None and i >= self.at]
        found = [Record(0, i, 0, None, v) for i, v in there[:max_records]]
        if found:
            self.at = found[-1].offset + 1
        return {0: found} if found else {}

    def seek(self, partition: int, offset: int) -> None:
        self.at = offset

    def position(self, partition: int) -> int:
        return self.at

    def highwater(self, partition: int) -> int | None:
        return len(self.records)

    def earliest(self, timeout_s: float) -> dict[int, int]:
        if not self.answers:
            raise LogUnavailable("log: away")
        return {0: self.begin}

    def identity(self) -> str | None:
        return self.name

    def refresh_identity(self, timeout_s: float) -> bool:
        return self.answers

    def connections(self) -> list[object]:
        return [] if self.connection is None else [self.connection]

    def hold_fetches(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms

    def close(self) -> None:
        self.closed += 1


class Reader(GuardedReader):
    """A guarded reader over that log."""

    def __init__(self, log: Log, position: int = 0, identity: str | None = None) -> None:
        super().__init__("nowhere:1", "t", [0], positions={0: position}, identity=identity)
        self._log = log
        self.waited_s: list[float] = []

    def _connect(self, timeout_s: float) -> LogLink:
        self.waited_s.append(timeout_s)
        if not self._log.answers:
            raise LogUnavailable("log: away")
        self._log.at = self._next[0]
        return self._log


@pytest.fixture
def log() -> Log:
    made = Log()
    made.records = [b"a", b"b", b"c"]
    return made


def started(log: Log, position: int = 0, identity: str | None = None) -> Reader:
    reader = Reader(log, position, identity)
    reader.start()
    return reader


def test_a_reader_that_was_not_started_says_so(log: Log) -> None:
    with pytest.raises(Permanent, match="not started"):
        Reader(log).poll(0)


def test_a_broker_that_lets_nobody_in_yet_is_given_more_time_each_time(log: Log) -> None:
    reader, log.answers = Reader(log), False
    for _ in range(4):
        with pytest.raises(LogUnavailable):
            reader.start()
    log.answers = True
    reader.start()
    reader.start()
    assert reader.waited_s == [3, 6, 10, 10, 10, 3]


@pytest.mark.parametrize("lost", ["no connection", "no answer"])
def test_a_client_that_stands_still_is_replaced_and_goes_on_where_it_was(
    log: Log, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("infra.log_reader.time.monotonic", lambda: now_s)
    reader = started(log)
    assert [r.value for r in reader.poll(0, max_records=1)] == [b"a"]
    stuck = Log()
    stuck.records, stuck.at = [b"a"], 1
    stuck.connection, stuck.answers = (None, True) if lost == "no connection" else (object(), False)
    reader._open_link = stuck
    now_s += 14
    assert reader.poll(0) == []
    assert (len(reader.waited_s), stuck.closed) == (1, 0)
    # The broker is away as well: it stays as it is, and is looked at again later.
    now_s += 2
    log.answers = False
    assert reader.poll(0) == []
    log.answers = True
    assert reader.poll(0) == []
    assert (len(reader.waited_s), stuck.closed) == (2, 0)
    now_s += 16
    assert [r.value for r in reader.poll(0)] == [b"b", b"c"]
    assert (len(reader.waited_s), stuck.closed) == (3, 1)


def test_records_fetched_over_a_new_connection_count_only_once_the_identity_is_known(log: Log) -> None:
    reader = started(log)
    log.connection, log.answers = object(), False
    assert reader.poll(0) == []
    assert reader.positions() == {0: 0}
    log.answers = True
    assert [r.value for r in reader.poll(0)] == [b"a", b"b", b"c"]


def test_a_log_of_another_name_is_lost_even_when_it_reaches_past_the_position(log: Log) -> None:
    reader = started(log)
    reader.poll(0, max_records=2)
    log.name, log.connection, log.records = "trirank-memory-b/1", object(), [b"x"] * 9
    with pytest.raises(LogLost) as lost:
        reader.poll(0)
    assert (lost.value.position, lost.value.resume_at) == (2, 0)
    reader.seek(0, 0)
    assert len(reader.poll(0)) == 9
    assert reader.identity == "trirank-memory-b/1"


def test_nothing_is_lost_when_nothing_was_read_of_the_old_log(log: Log) -> None:
    reader = started(log, identity="another/1")
    assert len(reader.poll(0)) == 3
    assert reader.identity == log.name


def test_a_gap_that_cannot_be_measured_yet_is_found_again(log: Log) -> None:
    reader = started(log)
    reader.poll(0)
    log.records, log.answers = [], False
    with pytest.raises(LogUnavailable):
        reader.poll(0)
    log.answers = True
    with pytest.raises(LogLost):
        reader.poll(0)


def test_a_log_that_begins_after_the_position_is_truncated_and_goes_on_at_its_beginning(log: Log) -> None:
    log.begin = 2
    reader = started(log, 1)
    with pytest.raises(LogTruncated) as cut:
        reader.poll(0)
    reader.seek(0, cut.value.resume_at)
    assert [r.offset for r in reader.poll(0)] == [2]


def test_a_record_that_is_shown_too_early_is_not_read_before_those_in_front_of_it(log: Log) -> None:
    log.records = [b"a", None, b"c", None, b"e"]
    reader = started(log)
    assert [r.value for r in reader.poll(0)] == [b"a"]
    assert reader.poll(0) == []
    assert reader.positions() == {0: 1}
    log.records[1] = b"b"
    assert [r.value for r in reader.poll(0)] == [b"b", b"c"]
    log.records[3] = b"d"
    assert [r.value for r in reader.poll(0)] == [b"d", b"e"]


def test_a_record_that_never_comes_is_reported_like_one_that_was_cut_off(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("infra.log_reader.time.monotonic", lambda: now_s)
    log.records = [b"a", None, b"c", None, None, b"f"]
    reader = started(log)
    reader.poll(0)
    now_s += 4
    assert reader.poll(0) == []
    now_s += 2
    for _ in range(2):
        with pytest.raises(LogTruncated) as cut:
            reader.poll(0)
    assert (cut.value.position, cut.value.resume_at) == (1, 2)
    reader.seek(0, 2)
    # The next hole has its own time.
    assert [r.value for r in reader.poll(0)] == [b"c"]
    assert reader.poll(0) == []
    now_s += 6
    with pytest.raises(LogTruncated) as cut:
        reader.poll(0)
    assert (cut.value.position, cut.value.resume_at) == (3, 5)


def test_holes_of_a_log_on_disk_are_what_compaction_left(log: Log) -> None:
    log.name = "MkU3OEVBNTcwNTJENDM2Qk/1"
    log.records = [b"a", None, b"c"]
    assert [r.value for r in started(log).poll(0)] == [b"a", b"c"]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_whatever_order_records_are_stored_in_they_are_read_in_theirs(steps: list[tuple[int, bool]]) -> None:
    log = Log()
    reader = started(log)
    read: list[int] = []
    for n, late in steps:
        # As the embedded broker does: the end is raised at once, and the records are stored then, or later.
        missing = [i for i, value in enumerate(log.records) if value is None]
        log.records += [None if late else b"x"] * n
        if missing and not late:
            log.records[missing[0]] = b"x"
        read += [record.offset for record in reader.poll(0)]
        assert read == list(range(len(read)))
    log.records = [b"x"] * len(log.records)
    read += [record.offset for record in reader.poll(0)]
    assert read == list(range(len(log.records)))


def test_a_reader_that_lags_and_gets_nothing_lets_the_broker_look_longer(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("infra.log_reader.time.monotonic", lambda: now_s)
    reader = started(log)
    monkeypatch.setattr(log, "fetch", lambda timeout_s, max_records: {})
    assert log.wait_ms == 20
    for expected_ms in (40, 80, 160):
        now_s += 1.0
        reader.poll(0)
        assert log.wait_ms == expected_ms
    monkeypatch.undo()
    monkeypatch.setattr("infra.log_reader.time.monotonic", lambda: now_s)
    now_s += 61.0
    reader.poll(0)
    assert log.wait_ms == 80


@given(st.integers(0, 10**9), st.integers(0, 60))
def test_the_wait_covers_the_walk_through_the_log_up_to_ten_seconds(records: int, starved: int) -> None:
    wait_ms = fetch_wait_ms(durable=False, records=records, starved=starved)
    assert 20 <= wait_ms <= 10_000
    assert wait_ms == 10_000 or wait_ms >= 0.75 * records / 1000
    assert fetch_wait_ms(durable=True, records=records, starved=starved) == 500


@pytest.mark.parametrize(
    ("cluster_id", "durable"),
    [("trirank-memory-1f", False), ("tansu_cluster", False), ("MkU3OEVBNTcwNTJENDM2Qk", True), ("", True)],
)
def test_brokers_without_a_disk_are_known_by_their_cluster_id(cluster_id: str, durable: bool) -> None:
    assert is_durable(cluster_id) is durable
