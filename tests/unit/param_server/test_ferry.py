"""The threads to the cold tier outlive whatever goes wrong there, and it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import REGISTRY

from param_server.cold import N_FLOORS, ColdStore
from param_server.ferry import Event, Ferry, Fetched, Stored
from param_server.leaving import Departure
from param_server.rowstate import RowState
from tests.support import eventually

ROW = Departure(1, RowState(2, np.zeros(2, np.float32)), 3, 4)


class Faulty:
    """A cold tier whose next call raises what no cold tier should."""

    def __init__(self) -> None:
        self.broken = False
        self.written: list[Departure] = []

    def identity(self) -> str:
        return "some"

    def evicts(self) -> bool:
        return False

    def floors(self, table_id: int) -> np.ndarray:
        return np.zeros(N_FLOORS, np.uint64)

    def read(self, table_id: int, keys: np.ndarray, dim: int) -> None:
        self._fail()

    def write(self, table_id: int, rows: list[Departure], gaps: object) -> None:
        self._fail()
        self.written += rows

    def close(self) -> None:
        """Nothing is open."""

    def _fail(self) -> None:
        if self.broken:
            self.broken = False
            raise ValueError("a bug")


@pytest.fixture
def store() -> Faulty:
    return Faulty()


@pytest.fixture
def ferry(store: Faulty) -> Iterator[Ferry]:
    ferry = Ferry(cast(ColdStore, store), lambda: None, "")
    ferry.start()
    yield ferry
    ferry.stop()


def faults(what: str) -> float:
    return REGISTRY.get_sample_value("param_server_cold_faults_total", {"what": what}) or 0.0


def told(lane: Any, kind: type[Event]) -> Any:
    """The next event of that kind."""
    return eventually(lambda: [event for event in lane.take() if isinstance(event, kind)])[0]


def test_a_read_that_fails_by_itself_is_answered_with_nothing_and_counted(ferry: Ferry, store: Faulty) -> None:
    lane, before = ferry.lane(1, 2), faults("read")
    store.broken = True
    lane.read(5, np.array([1]))
    fetched = told(lane, Fetched)
    assert (fetched.number, fetched.rows) == (5, None)
    eventually(lambda: faults("read") == before + 1)
    lane.read(6, np.array([1]))
    assert told(lane, Fetched).number == 6


def test_a_write_that_fails_by_itself_is_counted_and_tried_until_it_succeeds(ferry: Ferry, store: Faulty) -> None:
    lane, before = ferry.lane(1, 2), faults("write")
    store.broken = True
    lane.write([ROW])
    assert told(lane, Stored).rows == [ROW]
    assert store.written == [ROW]
    assert faults("write") == before + 1


def test_other_work_that_fails_by_itself_is_counted_and_does_not_end_the_writes(ferry: Ferry, store: Faulty) -> None:
    lane, before = ferry.lane(1, 2), faults("post")

    def fail(store: ColdStore) -> None:
        raise ValueError("a bug")

    ferry.post(fail)
    lane.write([ROW])
    assert told(lane, Stored).rows == [ROW]
    assert faults("post") == before + 1
