"""`trirank bench lookup|apply|topk|stall`: one table of the parameter server beside its peers, on the CPU or a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from infra.errors import ConfigurationError
from param_server.measure.lines import Line

# Before numpy: a table has one core, and so have its peers.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LEAST_SECONDS = 0.2

Device = Annotated[str, typer.Option(help="cpu, or cuda for the GPU that this process sees first.")]
Rows = Annotated[int | None, typer.Option(help="Rows of the table (default: cpu 200,000; cuda 90 % of 64 Mi places).")]
Dim = Annotated[int, typer.Option(help="Width of a row (cpu; a GPU measures 64 and 128).", min=1, max=4096)]
Seconds = Annotated[float, typer.Option(help="Time to measure for (cpu).", min=_LEAST_SECONDS, max=600)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
What = Literal["lookup", "apply", "topk", "stall"]


def lookup(
    device: Device = "cpu", rows: Rows = None, dim: Dim = 64, seconds: Seconds = 5.0, as_json: AsJson = False
) -> None:
    """Lookups of resident keys, beside reading the same rows without an index."""
    _measure("lookup", device, rows, dim, seconds, as_json)


def apply(
    device: Device = "cpu", rows: Rows = None, dim: Dim = 64, seconds: Seconds = 5.0, as_json: AsJson = False
) -> None:
    """Writes to resident rows (and, on a GPU, upserts that evict), beside writing without an index."""
    _measure("apply", device, rows, dim, seconds, as_json)


def topk(
    device: Device = "cpu", rows: Rows = None, dim: Dim = 64, seconds: Seconds = 5.0, as_json: AsJson = False
) -> None:
    """Exact recall over all rows, beside a matrix product and a selection."""
    _measure("topk", device, rows, dim, seconds, as_json)


def stall(
    device: Device = "cpu", rows: Rows = None, dim: Dim = 64, seconds: Seconds = 5.0, as_json: AsJson = False
) -> None:
    """Latency of lookups while rows are applied (cpu 100,000 a second, cuda 1,000,000), beside the same when idle."""
    _measure("stall", device, rows, dim, seconds, as_json)


COMMANDS: dict[str, Callable[..., None]] = {"lookup": lookup, "apply": apply, "topk": topk, "stall": stall}


def _measure(what: What, device: str, rows: int | None, dim: int, seconds: float, as_json: bool) -> None:
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"device: {device!r} is not cpu or cuda")
    if rows is not None and rows < 1:
        raise ConfigurationError(f"rows: {rows} is not 1 or more")
    from param_server.measure import lines as report

    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        progress.add_task(f"measuring {what} on {device}")
        name, lines = _on_gpu(what, rows) if device == "cuda" else _on_cpu(what, rows or 200_000, dim, seconds)
    if as_json:
        print(report.as_json(name, lines))
        return
    print(name)
    print(report.text(lines))


def _on_cpu(what: What, rows: int, dim: int, seconds: float) -> tuple[str, Sequence[Line]]:
    from param_server.measure import host

    parts = {"lookup": host.lookup, "apply": host.apply, "topk": host.topk, "stall": host.stall}
    load = os.getloadavg()[0]
    return f"cpu, {os.cpu_count()} cores, load {load:.1f}, {rows} rows of {dim} f32", parts[what](rows, dim, seconds)


def _on_gpu(what: What, rows: int | None) -> tuple[str, Sequence[Line]]:
    from param_server.table.device import open_device

    device = open_device("cuda", given=False)
    if device.name == "triton-interpreter":
        raise ConfigurationError(
            "device: times of Triton's interpreter mean nothing; unset TRITON_INTERPRET, or use cpu"
        )
    import torch

    from param_server.measure import gpu, gpu_stall, gpu_timing

    torch.manual_seed(1)
    parts = {"lookup": gpu.lookup, "apply": gpu.apply, "topk": gpu.topk, "stall": gpu_stall.stall}
    slots = gpu.SLOTS if rows is None else int(rows / gpu.LOAD)
    return gpu_timing.card(), parts[what](slots, gpu.LOAD)
