"""`trirank snapshot`: take, list, check and restore snapshots of the shards."""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from infra.commands.updates import running
from infra.errors import ConfigurationError, TrirankError
from infra.lifecycle import alive
from infra.settings import Settings, load_settings
from infra.state import StackState, read_state

app = typer.Typer(help="Snapshots of the parameter server.", no_args_is_help=True)
Home = Annotated[Path | None, typer.Option(help="Home folder of the stack (default .trirank).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Root = Annotated[Path | None, typer.Option("--from", help="Folder of snapshots (default: those of the home folder).")]
_POLL_S = 0.05


@app.command()
def save(
    full: Annotated[bool, typer.Option("--full", help="Write everything, not only what changed.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait.")] = 600.0,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Have every shard of the running stack write a snapshot now; returns when all are written."""
    state = running(load_settings(home=home))
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("saving", total=state.shards)
        saved = asyncio.run(_save(state, full, timeout_s, lambda: progress.advance(task)))
    if as_json:
        print(json.dumps(saved, indent=2))
        return
    for index, snapshot in sorted(saved.items()):
        print(f"shard {index}: {snapshot['newest']} ({snapshot['kind']}, {snapshot['rows']} rows)")


@app.command("list")
def show(home: Home = None, root: Root = None, as_json: AsJson = False) -> None:
    """List the snapshots on disk, newest last."""
    rows = [_about(folder) for folder in _folders(_root(load_settings(home=home), root))]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        if "refused" in row:
            print(f"{row['snapshot']}  {row['refused']}")
            continue
        size = f"{row['rows']:>10} rows  {row['records']} records applied"
        print(f"{row['snapshot']}  {row['kind']:<5}  {row['taken']}  {size}")


@app.command()
def verify(home: Home = None, root: Root = None) -> None:
    """Read every byte: checksums, and that deltas go on from each other; exit status 1 if anything is wrong."""
    from param_server.chain import check_contiguous
    from param_server.snapshot import SnapshotRefused, Stored, read_manifest, verify_tensors

    wrong = 0
    known: dict[tuple[Path, str], Stored] = {}
    place = _root(load_settings(home=home), root)
    folders = list(_folders(place))
    if not folders:
        raise ConfigurationError(f"from: {place} holds no snapshots")
    for folder in folders:
        try:
            stored = read_manifest(folder)
            verify_tensors(stored)
            if stored.manifest.kind == "delta":
                base = known.get((folder.parent, stored.manifest.base))
                if base is None:
                    raise SnapshotRefused(f"a gap: its base {stored.manifest.base} is not here, or not sound")
                check_contiguous(base, stored)
            known[(folder.parent, stored.manifest.id)] = stored
            print(f"{_name(folder)}: sound")
        except SnapshotRefused as error:
            wrong += 1
            print(f"{_name(folder)}: {error}")
    if wrong:
        raise TrirankError(f"{wrong} of {len(folders)} snapshots cannot be used; a start takes the newest that can")


@app.command()
def restore(
    shards: Annotated[int, typer.Option(help="Number of shards that will serve.")],
    source: Annotated[
        Path | None, typer.Argument(help="Folder of snapshots, perhaps of another stack (default: the home folder's).")
    ] = None,
    home: Home = None,
) -> None:
    """Make the snapshots in SOURCE the ones the next `trirank up` begins with, spread over --shards shards."""
    from param_server.rehash import rehash
    from param_server.snapshot import Stored

    settings = load_settings(home=home)
    state = read_state(settings)
    if state is not None and alive(state.supervisor_pid):
        raise ConfigurationError("home: the stack is running and writes snapshots itself; `trirank down` stops it")
    target = _root(settings, None)

    def done(stored: Stored) -> None:
        owner, rows = stored.manifest.owner, sum(stored.manifest.rows.values())
        print(f"shard {owner.index} of {owner.n_shards}: {rows} rows")

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = rehash(source or target, target, shards, done)
    except OSError as error:
        raise TrirankError(f"{target}: {error}; nothing was changed") from error
    print(f"restored into {target}; start with `trirank up --shards {shards}`")
    if before is not None:
        print(f"what was there is kept in {before}")


async def _save(state: StackState, full: bool, timeout_s: float, done: Any) -> dict[int, dict[str, Any]]:
    from infra.deadline import Deadline
    from infra.directory import read_directory
    from infra.wire.client import WireClient
    from infra.wire.connection import Peer

    entries = [entry for entry in read_directory(state.redis, state.stack) if entry.role == "shard"]
    # Of the replicas of a shard the first one writes snapshots.
    entries = [entry for entry in entries if not entry.meta.get("replica")]
    shards = {int(entry.meta["shard"]): entry for entry in entries}
    if len(shards) < state.shards:
        raise TrirankError(f"{len(shards)} of {state.shards} shards are up; see `trirank status`")
    wire = WireClient(role="shard")
    deadline = Deadline.after(timeout_s)
    try:
        wire.set_peers([Peer(e.name, e.address, e.release, e.meta) for e in shards.values()])
        await wire.wait_live(len(shards), deadline=Deadline.after(min(10.0, timeout_s)))

        async def one(index: int) -> dict[str, Any]:
            name = shards[index].name
            asked = await wire.call("snapshot", args={"full": full}, deadline=deadline, peer=name)
            while True:
                health = (await wire.call("health", deadline=deadline, peer=name)).args["snapshot"]
                if health["answered"] >= asked.args["number"]:
                    break
                await asyncio.sleep(_POLL_S)
            if health["error"]:
                raise TrirankError(f"shard {index}: {health['error']}; the snapshots before it are untouched")
            done()
            return dict(health)

        saved = await asyncio.gather(*(one(index) for index in shards))
    finally:
        await wire.close()
    return dict(zip(shards, saved, strict=True))


def _root(settings: Settings, given: Path | None) -> Path:
    return given or settings.run_dir / "snapshots" / settings.stack


def _folders(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("of-*/shard-*/snap-*"))


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-3:])


def _about(folder: Path) -> dict[str, Any]:
    from param_server.snapshot import SnapshotRefused, read_manifest

    try:
        manifest = read_manifest(folder).manifest
    except SnapshotRefused as error:
        return {"snapshot": _name(folder), "refused": str(error)}
    taken = datetime.datetime.fromtimestamp(manifest.taken_us / 1e6, datetime.UTC)
    return {
        "snapshot": _name(folder),
        "kind": manifest.kind,
        "id": manifest.id,
        "base": manifest.base,
        "taken": taken.isoformat(timespec="seconds"),
        "rows": sum(manifest.rows.values()),
        "records": sum(at.offset for at in manifest.log.positions.values()),
        "positions": {p: at.offset for p, at in manifest.log.positions.items()},
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "generation": manifest.owner.generation,
    }
