"""How metrics are made: names `<tier>_<thing>_<unit>`, help texts that say what to do, closed label sets.

When PROMETHEUS_MULTIPROC_DIR is set (the stack sets it before any process starts) every process of this machine
writes into that folder and any gateway can answer `/metrics` for all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess, values

from infra.buffered import buffered, write_all
from infra.lifecycle import alive

# Has to be before the first metric is made.
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    values.ValueClass = buffered(values.ValueClass)

LATENCY_BUCKETS_S = (
    0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
_LIVE = re.compile(r"gauge_live[a-z]+_(\d+)\.db")
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """A number that only grows."""
    return Counter(name, help_text, labels)


def gauge(name: str, help_text: str, labels: Sequence[str] = (), *, mode: str = "livemostrecent") -> Gauge:
    """A number that moves both ways; `mode` is how processes are combined (livemostrecent, livesum, livemax)."""
    return Gauge(name, help_text, labels, multiprocess_mode=mode)  # type: ignore[arg-type]


def latency(name: str, help_text: str, labels: Sequence[str] = ()) -> Histogram:
    """A histogram of seconds with buckets from 0.25 ms."""
    return Histogram(name, help_text, labels, buckets=LATENCY_BUCKETS_S)


def sizes(name: str, help_text: str, labels: Sequence[str] = ()) -> Histogram:
    """A histogram of counts (batch sizes, rows)."""
    return Histogram(name, help_text, labels, buckets=SIZE_BUCKETS)


def exposition() -> bytes:
    """All metrics in Prometheus text format: of every process of the stack here, or of this one alone."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest()
    write_all()
    _forget_the_dead(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def join_folder(folder: Path) -> None:
    """Have this process, which counted alone so far, and all that it starts write into the folder of the stack. Numbers
    without labels, and those whose labels were used before, stay this process's own."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = buffered(values.MultiProcessValue())  # type: ignore[no-untyped-call]


def _forget_the_dead(folder: Path) -> None:
    """Drop the live gauges of processes that have ended: what one that was killed served last is served no more."""
    pids = {int(match[1]) for file in folder.iterdir() if (match := _LIVE.fullmatch(file.name))}
    for pid in pids:
        if not alive(pid):
            # Another gateway may be doing the same.
            with suppress(FileNotFoundError):
                multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]
