"""When an entry counts: it was written lately, it has not left, and Redis losing it is no reason to forget it."""

from __future__ import annotations

import asyncio

import pytest

from infra.directory import DirectoryReader, Entry, Record
from infra.errors import RedisUnavailable
from tests.support import free_port


def entry(name: str, generation: int = 1) -> Entry:
    return Entry("edge", name, f"ipc:///run/{name}", "r1", generation, 1, "host", {"k": 1})


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(clock: Clock) -> DirectoryReader:
    return DirectoryReader(f"redis://127.0.0.1:{free_port()}/0", "test", clock_s=clock)


def names(entries: list[Entry]) -> list[str]:
    return [e.name for e in entries]


def test_entries_come_in_order_and_a_newer_one_replaces_the_older(reader: DirectoryReader) -> None:
    assert names(reader.merge({"edge/b": Record(0.1, entry("b")), "edge/a": Record(0.1, entry("a"))})) == ["a", "b"]
    merged = reader.merge({"edge/a": Record(0.1, entry("a", generation=2))})
    assert merged == [entry("a", generation=2), entry("b")]


def test_an_entry_that_has_left_goes_at_once(reader: DirectoryReader) -> None:
    reader.merge({"edge/a": Record(0.1, entry("a"))})
    assert reader.merge({"edge/a": Record(0.1, None)}) == []


def test_an_entry_written_too_long_ago_is_not_taken_up(reader: DirectoryReader) -> None:
    assert reader.merge({"edge/a": Record(3.1, entry("a"))}) == []


@pytest.mark.parametrize("later", [{}, {"edge/a": Record(3.2, entry("a"))}])
def test_an_entry_goes_when_it_was_not_written_for_three_seconds(
    reader: DirectoryReader, clock: Clock, later: dict[str, Record]
) -> None:
    reader.merge({"edge/a": Record(0.2, entry("a"))})
    clock.now_s += 2.7
    assert names(reader.merge({})) == ["a"]
    clock.now_s += 0.3
    assert reader.merge(later) == []


async def fails(reader: DirectoryReader) -> None:
    with pytest.raises(RedisUnavailable):
        await reader.read()
    await reader.close()


def test_after_redis_was_away_everybody_has_three_seconds_to_write_again(reader: DirectoryReader, clock: Clock) -> None:
    reader.merge({"edge/a": Record(0.1, entry("a")), "edge/b": Record(0.1, entry("b"))})
    clock.now_s += 60
    asyncio.run(fails(reader))
    stale = {"edge/b": Record(60.0, entry("b"))}
    assert names(reader.merge(stale)) == ["a", "b"]
    clock.now_s += 2.9
    assert names(reader.merge({"edge/a": Record(0.1, entry("a"))})) == ["a", "b"]
    clock.now_s += 0.2
    assert names(reader.merge({"edge/a": Record(0.3, entry("a"))})) == ["a"]
