"""What was measured, as a table and as JSON. Pure.

A round measures every system once; a number of the table is the median of its rounds, a ratio the median of the ratios
within a round, so that a machine that is slower in one round does not favour anybody.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from tests.bench.load import Measured

# One round: system -> number of clients -> result.
Round = Mapping[str, Mapping[int, Measured]]
_WIDTH = 13


def summary(rounds: Sequence[Round]) -> dict[str, dict[int, dict[str, float]]]:
    """system -> clients -> medians of requests_per_s, p50_ms, p99_ms and cpu_ms, and sums of what went wrong."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for system, by_clients in rounds[0].items():
        for clients in by_clients:
            runs = [each[system][clients] for each in rounds]
            found.setdefault(system, {})[clients] = {
                "requests_per_s": median(run.requests_per_s for run in runs),
                "p50_ms": median(_number(run.p50_ms) for run in runs),
                "p99_ms": median(_number(run.p99_ms) for run in runs),
                "cpu_ms": median(_number(run.cpu_ms) for run in runs),
                "non_200": sum(run.non_200 for run in runs),
                "degraded": sum(run.degraded for run in runs),
                "broken": sum(run.broken for run in runs),
            }
    return found


def ratios(rounds: Sequence[Round], ours: str) -> dict[str, dict[int, dict[str, float]]]:
    """peer -> clients -> how many times the requests/s of the peer; its p50 and its CPU time per request over ours."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for peer in rounds[0]:
        if peer == ours or ours not in rounds[0]:
            continue
        for clients in rounds[0][peer]:
            pairs = [(each[ours][clients], each[peer][clients]) for each in rounds]
            found.setdefault(peer, {})[clients] = {
                "requests_per_s": round(median(_over(o.requests_per_s, p.requests_per_s) for o, p in pairs), 2),
                "p50": round(median(_over(_number(p.p50_ms), _number(o.p50_ms)) for o, p in pairs), 2),
                "cpu": round(median(_over(_number(p.cpu_ms), _number(o.cpu_ms)) for o, p in pairs), 2),
            }
    return found


def table(rounds: Sequence[Round], ours: str) -> str:
    """For people."""
    numbers, times = summary(rounds), ratios(rounds, ours)
    lines = [_line("system", "clients", "p50 ms", "p99 ms", "requests/s", "CPU ms each", "failed", "degraded")]
    for system, by_clients in numbers.items():
        for clients, n in by_clients.items():
            failed = int(n["non_200"] + n["broken"])
            lines.append(
                _line(
                    system,
                    clients,
                    f"{n['p50_ms']:.2f}",
                    f"{n['p99_ms']:.2f}",
                    f"{n['requests_per_s']:.0f}",
                    f"{n['cpu_ms']:.2f}",
                    failed,
                    int(n["degraded"]),
                )
            )
    if times:
        lines += ["", _line(f"{ours} against", "clients", "requests/s", "p50", "CPU each")]
    for peer, by_clients in times.items():
        for clients, times_better in by_clients.items():
            lines.append(_line(peer, clients, *(f"{times_better[k]:.2f} x" for k in ("requests_per_s", "p50", "cpu"))))
    return "\n".join(lines)


def document(rounds: Sequence[Round], ours: str, **about: Any) -> bytes:
    """For scripts."""
    found = {
        **about,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "summary": summary(rounds),
        "ratios": ratios(rounds, ours),
        "rounds": rounds,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def faults(rounds: Sequence[Round]) -> int:
    """Replies that were no full answers; with any, the numbers compare different work."""
    return sum(run.non_200 + run.degraded + run.broken for each in rounds for s in each.values() for run in s.values())


def _line(*cells: object) -> str:
    return "".join(f"{cell!s:<16}" if i == 0 else f"{cell!s:>{_WIDTH}}" for i, cell in enumerate(cells))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _over(one: float, other: float) -> float:
    return one / other if other else float("nan")
