"""The command `trirank bench models`: options in, a table, JSON or a chart out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from infra.commands.bars import Bar, Group, bars
from infra.commands.release_show import table
from infra.engine.names import check_names
from infra.errors import InvalidInput
from infra.release import ROLES, Role, read_release

if TYPE_CHECKING:
    from infra.commands.bench_models import Report, Shape

# Before numpy and torch: an engine has one core, and so has its peer.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LIMITS = (64, 100, 2000)
SHAPES = "1x50x200,1x50x100,1x10x500,8x50x100"


def models(
    release: Annotated[Path, typer.Option(help="Release directory.")],
    engines: Annotated[str, typer.Option(help="Engines (`kind` or `kind:precision`, with commas; default all).")] = "",
    role: Annotated[str, typer.Option(help="`edge`, `rerank`, or both with a comma.")] = "edge,rerank",
    shapes: Annotated[str, typer.Option(help="REQUESTSxHISTORYxCANDIDATES of a batch, with commas.")] = SHAPES,
    seconds: Annotated[float, typer.Option(help="Time per role and shape, all engines in turn.", min=0.1)] = 3.0,
    folder: Annotated[Path | None, typer.Option(help="Folder of built engines (default: RELEASE.engines).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart of the latencies here (.svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Latency, throughput, memory, size and quality of every engine, beside PyTorch eager in the paper's form.

    Runs on one core. Times on a busy machine are upper bounds; ratios are of one run, in which engines take turns, and
    by time on the core where an engine runs on the CPU.
    """
    names = _engines(engines)
    wanted_roles, wanted_shapes = _roles(role), _shapes(shapes)
    if plot is not None and plot.suffix != ".svg":
        raise InvalidInput("plot", f"{plot} must end with .svg")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise InvalidInput("plot", f"{plot.parent} is no folder")
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    from infra.commands.bench_models import Measurement

    measurement = Measurement(read_release(release), folder, names)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        transient=True, disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task("reading the release")
        report = measurement.report(
            wanted_roles, wanted_shapes, seconds, lambda text: progress.update(task, description=text)
        )
    print(json.dumps(report.as_dict(), indent=2) if as_json else text(report))
    if plot is not None:
        plot.write_text(chart(report))
    if not report.engines:
        raise typer.Exit(1)


def text(report: Report) -> str:
    """Two tables: times per shape, and what does not depend on it."""
    times = table(
        ["role", "engine", "shape", "p50 ms", "p95 ms", "CPU ms", "requests/s", "x peer"],
        [
            [
                row.role, row.engine, row.shape, f"{row.timing.p50_ms:.3f}", f"{row.timing.p95_ms:.3f}",
                f"{row.timing.cpu_p50_ms:.3f}", f"{row.timing.requests_per_s:,.0f}", f"{row.times_faster:.1f}",
            ]
            for row in report.rows
        ],
    )  # fmt: skip
    facts = table(
        ["role", "engine", "file kB", "weights kB", "process grew MB", "AUC", "AUC change", "overlap@20", "logit rmse"],
        [
            [
                one.role, one.engine, f"{one.file_bytes / 1e3:,.0f}", f"{one.memory_bytes / 1e3:,.0f}",
                f"{one.resident_bytes / 1e6:.1f}",
                "-" if one.agreement.auc is None else f"{one.agreement.auc:.4f}",
                "-" if one.agreement.auc_change_pct is None else f"{one.agreement.auc_change_pct:+.3f} %",
                f"{one.agreement.overlap_at_20:.4f}", f"{one.agreement.logit_rmse:.1e}",
            ]
            for one in report.engines
        ],
    )  # fmt: skip
    absent = "\n".join(f"not measured: {name}: {reason}" for name, reason in report.unavailable.items())
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return "\n\n".join(part for part in (f"{report.release} on {machine}", times, facts, absent) if part)


def chart(report: Report) -> str:
    """Bars of the median latency, one group per role and shape, as SVG."""
    groups: dict[str, list[Bar]] = {}
    for row in report.rows:
        note = f"{row.timing.p50_ms:.3g} ms, {row.times_faster:.1f} x"
        groups.setdefault(f"{row.role} {row.shape}", []).append(Bar(row.engine, row.timing.p50_ms, note))
    title = f"{report.release}: median latency of one batch, one core (requests x history x candidates)"
    return bars(title, [Group(name, tuple(of_group)) for name, of_group in groups.items()])


def _engines(given: str) -> Sequence[str]:
    try:
        return check_names(name.strip() for name in given.split(",") if name.strip())
    except ValueError as error:
        raise InvalidInput("engines", str(error)) from error


def _roles(given: str) -> list[Role]:
    names = [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in ROLES]:
        raise InvalidInput("role", f"{unknown[0]!r} is none of {', '.join(ROLES)}")
    return [role for role in ROLES if role in names]


def _shapes(given: str) -> list[Shape]:
    found: list[Shape] = []
    for one in given.split(","):
        parts = one.strip().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise InvalidInput("shapes", f"{one!r} is not REQUESTSxHISTORYxCANDIDATES, for example 1x50x200")
        n_requests, length, n = (int(part) for part in parts)
        if not all(1 <= size <= most for size, most in zip((n_requests, length, n), _LIMITS, strict=True)):
            raise InvalidInput("shapes", f"{one!r} is not between 1x1x1 and {'x'.join(map(str, _LIMITS))}")
        found.append((n_requests, length, n))
    return found
