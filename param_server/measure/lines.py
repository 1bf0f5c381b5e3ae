"""Lines of a report, and host times of calls that take turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from infra.errors import TrirankError


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement: median time of a call, and what it means as a rate; `cpu_us` is processor time, where known."""

    name: str
    median_us: float
    rate: float
    unit: str
    target: str = ""
    cpu_us: float | None = None


def text(lines: Sequence[Line]) -> str:
    """A table for people."""
    rows = []
    for line in lines:
        cpu = "" if line.cpu_us is None else f"cpu {line.cpu_us:10.2f} us"
        row = f"{line.name:<58} {line.median_us:>11.2f} us {line.rate:>9.2f} {line.unit:<9} {cpu} {line.target}"
        rows.append(row.rstrip())
    return "\n".join(rows)


def as_json(device: str, lines: Sequence[Line]) -> str:
    """The same for a script."""
    return json.dumps({"device": device, "lines": [asdict(line) for line in lines]})


def check(holds: bool, what: str) -> None:
    """Raises TrirankError when a timed answer is wrong: its time means nothing then."""
    if not holds:
        raise TrirankError(f"bench {what}: the answer is wrong; this is a defect, the times were thrown away")


@dataclass(frozen=True, slots=True)
class Spent:
    """Median wall and processor time of a call, microseconds."""

    wall_us: float
    cpu_us: float


def in_turns(calls: Mapping[str, Callable[[int], object]], seconds: float) -> dict[str, Spent]:
    """Time calls that take turns until the time is over, three rounds at least; each is given the number of the round.

    In turns, because other work on the machine then slows all of them alike.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end_s = time.perf_counter() + seconds
    number = 0
    while number < 3 or time.perf_counter() < end_s:
        number += 1
        for name, call in calls.items():
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            call(number)
            wall[name].append(time.perf_counter() - wall_s)
            cpu[name].append(time.thread_time() - cpu_s)
    return {name: Spent(median(wall[name]) * 1e6, median(cpu[name]) * 1e6) for name in calls}
