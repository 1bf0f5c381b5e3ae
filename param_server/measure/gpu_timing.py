"""Device times for the GPU benchmarks, tables filled to a load, and lines of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from param_server.contract import Op
from param_server.measure.lines import Line
from param_server.table.gpu import GpuTable
from param_server.table.gpu_arrays import Dtype, buckets_for, carve
from param_server.table.gpu_launch import Staged

CHUNK = 1 << 20
_HEAD_START_CYCLES = 40_000_000


def device_us(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Time of each call between events on the device, taking turns over `calls`; two rounds of warming up."""
    for call in [*calls, *calls][: max(2, len(calls))]:
        call()
    return timed([calls[i % len(calls)] for i in range(repeats)])


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The same for calls that must run once each, without warming up.

    The device is kept busy at first, so that it never waits for the host to launch the next one.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    events = []
    for call in calls:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def graph_us(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Time of one call when all follow each other in a CUDA graph, so that no launch is waited for."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [spent / len(calls) for spent in device_us([graph.replay], repeats)]


def rows_line(name: str, n: int, times_us: Sequence[float], target: str = "") -> Line:
    """A rate in thousand million rows per second."""
    middle = median(times_us)
    return Line(name, round(middle, 2), round(n / middle / 1e3, 2), "G rows/s", target)


def random_keys(n: int) -> torch.Tensor:
    """i64[n] on the device; the chance of a double is nil."""
    return torch.randint(-(2**63), 2**63 - 1, (n,), device="cuda")


def rows_for(keys: torch.Tensor, dim: int) -> torch.Tensor:
    """f32[n, dim]: noise, with the low bits of the key in front so that an answer can be checked."""
    rows = torch.randn((keys.numel(), dim), device="cuda")
    rows[:, 0] = (keys & 1023).float()
    return rows


def filled_table(slots: int, load: float, dim: int, dtype: Dtype) -> tuple[GpuTable, torch.Tensor]:
    """A table of about so many slots with random keys up to the load, and its keys."""
    arrays = carve([buckets_for(slots)], dim, dtype, torch.device("cuda"))[0]
    default = np.zeros(dim, np.float32)
    table = GpuTable(dim=dim, capacity_rows=slots, default_row=default, dtype=dtype, arrays=arrays)
    keys = random_keys(int(slots * load))
    for part in keys.split(CHUNK):  # type: ignore[no-untyped-call]
        table.writer.write(Staged(Op.ASSIGN, part, torch.ones_like(part), rows_for(part, dim)))
    return table, keys


def sample(keys: torch.Tensor, n: int, sets: int) -> list[torch.Tensor]:
    """Uniform samples of the keys, one per set, so that no run finds the rows of the last one in the cache."""
    return [keys[torch.randint(0, keys.numel(), (n,), device="cuda")] for _ in range(sets)]


def card() -> str:
    """What this ran on."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
