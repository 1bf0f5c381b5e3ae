from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infra.buffered import buffered, write_all
from tests.support import eventually


class Written:
    """A value that notes how often it was written."""

    def __init__(self) -> None:
        self.value = 0.0
        self.writes = 0

    def inc(self, amount: float) -> None:
        self.value += amount
        self.writes += 1

    def set(self, value: float, timestamp: float | None = None) -> None:
        self.value = value
        self.writes += 1

    def get(self) -> float:
        return self.value


def test_many_steps_are_one_write_and_are_seen_at_once() -> None:
    below = Written()
    value = buffered(lambda: below)()

    for _ in range(1000):
        value.inc(2)

    assert value.get() == 2000
    write_all()
    assert below.value == 2000
    assert below.writes <= 10
    assert value.get() == 2000


def test_steps_are_written_by_themselves_again_and_again() -> None:
    below = Written()
    value = buffered(lambda: below)()

    value.inc(1)
    eventually(lambda: below.value == 1)
    value.inc(1)
    eventually(lambda: below.value == 2)


def test_a_set_value_wins_over_steps_before_it() -> None:
    below = Written()
    value = buffered(lambda: below)()

    value.inc(5)
    value.set(3)
    value.inc(1)
    write_all()

    assert below.value == value.get() == 4


_COUNTS = """
from infra.metrics import counter, exposition, latency
counter("steps_total", "Steps.").inc(3)
latency("took_seconds", "Time.", ("what",)).labels("a").observe(0.5)
print(exposition().decode())
"""


def test_the_exposition_has_what_was_counted_a_moment_ago_and_the_next_process_finds_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def counted() -> str:
        return subprocess.run(
            [sys.executable, "-c", _COUNTS], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first, second = counted(), counted()

    assert "steps_total 3.0" in first
    assert 'took_seconds_count{what="a"} 1.0' in first
    assert "steps_total 6.0" in second


_JOINS = """
import sys
from pathlib import Path
from infra.metrics import counter, exposition, join_folder
steps = counter("steps_total", "Steps.", ("what",))
steps.labels("alone").inc()
join_folder(Path(sys.argv[1]))
steps.labels("together").inc(2)
print(exposition().decode())
"""


def test_a_process_that_joins_the_folder_late_is_in_the_exposition_of_all(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _JOINS, str(tmp_path)], capture_output=True, text=True, check=True)

    assert 'steps_total{what="together"} 2.0' in done.stdout
    assert "alone" not in done.stdout
    assert list(tmp_path.glob("counter_*.db"))


_IS_THERE = """
from infra.metrics import exposition, gauge
gauge("there", "Processes.", mode="livesum").set(1)
print(exposition().decode())
"""


def test_what_a_process_that_has_ended_was_doing_is_not_in_the_exposition(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _IS_THERE], env=environment, capture_output=True, text=True, check=True
        )
        assert "there 1.0" in done.stdout
