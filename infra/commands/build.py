"""`trirank release build`: the engines of a release, made ahead of time for the machines that will serve it.

Engines are derived from the release and lie beside it, never inside. Refuses a target nobody builds. One target's
failure does not keep the others from being built; the exit status tells.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from infra.engine.offers import engine_folder
from infra.engine.tensorrt.targets import TARGET_SMS
from infra.errors import InvalidInput, TrirankError
from infra.release import Release, read_release

# (release, target, engine folder, builder or None for the target's usual one) -> files written.
Build = Callable[[Release, str, Path, str | None], list[Path]]
# target -> "module:function" of type Build; imported only when that target is built.
TARGETS: dict[str, str] = {
    "cpu": "infra.engine.aot_build:build_cpu",
    **dict.fromkeys(TARGET_SMS, "infra.engine.tensorrt.release:build_target"),
}


def build(
    directory: Annotated[Path, typer.Argument(help="Release directory.")],
    targets: Annotated[str, typer.Option(help="Machines to build for, separated by commas.")],
    builder: Annotated[
        str | None, typer.Option(help="What builds for GPUs: tensorrt (default) or tensorrt-rtx.")
    ] = None,
    engines: Annotated[Path | None, typer.Option(help="Engine folder (default: RELEASE.engines).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was built, and why what was not, as JSON.")
    ] = False,
) -> None:
    """Build the engines of a release for the machines that will serve it; exit status 2 when one cannot be built."""
    release = read_release(directory)
    folder = engines or engine_folder(directory.resolve())
    names = _names(targets)
    # The CPU has one builder; a choice for GPUs that stand beside it is not meant for it.
    chosen = {name: None if name == "cpu" and len(names) > 1 else builder for name in names}
    built: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    jobs = [(target, _build_of(target)) for target in names]
    # Before minutes of compiling: a path that cannot be a folder ends it here.
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task("building", total=len(jobs))
        for target, make in jobs:
            progress.update(task, description=f"building for {target}")
            try:
                files = make(release, target, folder, chosen[target])
                built += [{"target": target, "file": str(file), "bytes": file.stat().st_size} for file in files]
            except TrirankError as error:
                failed[target] = str(error)
            progress.advance(task)
    _report(built, failed, as_json)
    if failed:
        raise typer.Exit(2)


def _report(built: list[dict[str, Any]], failed: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"built": built, "failed": failed}, indent=2))
        return
    for one in built:
        print(f"{one['target']}: {one['file']} ({one['bytes']:,} bytes)")
    for target, reason in failed.items():
        print(f"{target}: {reason}", file=sys.stderr)


def _names(targets: str) -> list[str]:
    names = [name.strip() for name in targets.split(",") if name.strip()]
    if not names:
        raise InvalidInput("targets", "names no target")
    return list(dict.fromkeys(names))


def _build_of(target: str) -> Build:
    if target not in TARGETS:
        known = f"there are {', '.join(sorted(TARGETS))}" if TARGETS else "this version builds for none"
        raise InvalidInput("targets", f"{target!r} is no target; {known}")
    module, _, function = TARGETS[target].partition(":")
    made: Build = getattr(importlib.import_module(module), function)
    return made
