"""When snapshots are taken, and what a failed one leaves behind."""

from __future__ import annotations

from pathlib import Path

from param_server.keeper import SnapshotKeeper
from param_server.snapshot import load_newest
from tests.unit.param_server.test_snapshot import OWNER, a_snapshot


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def monotonic_s(self) -> float:
        return self.time_s

    def now_us(self) -> int:
        return 0


def test_a_snapshot_is_due_after_the_interval_and_written_beside(tmp_path: Path) -> None:
    clock = FakeClock()
    keeper = SnapshotKeeper(tmp_path, 30.0, clock)
    clock.time_s = 29.0
    assert not keeper.due
    clock.time_s = 30.0
    assert keeper.due
    keeper.keep(a_snapshot)
    assert not keeper.due
    keeper.wait()
    assert (keeper.written, keeper.newest_taken_us, keeper.behind) == (1, 123, False)
    assert load_newest(tmp_path, OWNER) is not None


def test_a_snapshot_that_cannot_be_written_is_counted_and_owed(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    keeper = SnapshotKeeper(blocked, 30.0, FakeClock())
    keeper.keep_now(a_snapshot())
    assert (keeper.written, keeper.failed, keeper.behind) == (0, 1, True)
