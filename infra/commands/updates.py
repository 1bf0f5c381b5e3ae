"""`trirank updates`: put embedding rows on the stream, and see when they are visible."""

from __future__ import annotations

import asyncio
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import Progress

from infra.commands.update_file import UpdateRows, read_rows
from infra.errors import ConfigurationError, InvalidInput, TrirankError
from infra.release import Item, Release, TableEntry, read_release
from infra.settings import Settings, load_settings
from infra.state import StackState, read_state

app = typer.Typer(help="Embedding updates on the stream.", no_args_is_help=True)
_CHUNK_ROWS = 16384
_VISIBLE_TIMEOUT_S = 30.0


class Operation(StrEnum):
    """What is done to the rows."""

    ASSIGN = "assign"
    ADD = "add"
    DELETE = "delete"


@app.callback()
def group() -> None:
    """Embedding updates on the stream."""


@app.command()
def publish(
    file: Annotated[Path, typer.Argument(help="npz, safetensors, parquet or csv with ids or keys, and rows.")],
    table: Annotated[str, typer.Option(help="Table of the release: item, user, user_bucket, ...")] = "item",
    op: Annotated[Operation, typer.Option(help="assign replaces rows, add adds to them, delete removes them.")] = (
        Operation.ASSIGN
    ),
    wait: Annotated[bool, typer.Option("--wait", help="Wait until lookups see the rows; print how long.")] = False,
    home: Annotated[Path | None, typer.Option(help="Home folder of the running stack (default .trirank).")] = None,
) -> None:
    """Publish the rows of FILE to the stream of the running stack, acknowledged by the broker."""
    from infra.kafka import LogProducer
    from param_server.contract import Op
    from param_server.publish import Publisher

    settings = load_settings(home=home)
    state = running(settings)
    release = read_release(Path(state.release), verify_files=False)
    entry = _entry(release, table)
    rows = read_rows(file, table, entry.dim, with_rows=op is not Operation.DELETE)
    _register(state, rows)
    log = LogProducer(state.kafka)
    log.start()
    try:
        publisher = Publisher(log, f"{state.stack}.embeddings", state.partitions)
        started_s = time.monotonic()
        with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("publishing", total=rows.keys.size)
            for start in range(0, rows.keys.size, _CHUNK_ROWS):
                part = slice(start, start + _CHUNK_ROWS)
                publisher.publish(
                    Op[op.name], entry.table_id, release.manifest.generation, rows.keys[part],
                    rows.rows[part], time.time_ns() // 1000,
                )  # fmt: skip
                progress.advance(task, min(_CHUNK_ROWS, rows.keys.size - start))
            publisher.flush()
    finally:
        log.close()
    acked_ms = (time.monotonic() - started_s) * 1e3
    print(f"{rows.keys.size} rows of table {table} acknowledged after {acked_ms:.1f} ms")
    if wait:
        if op is Operation.ADD:
            raise ConfigurationError(
                "wait: what an add leads to depends on the row before it; wait for assign or delete"
            )
        asyncio.run(_wait_visible(state, release, table, rows, op))
        print(f"visible after {(time.monotonic() - started_s) * 1e3:.1f} ms")


@app.command()
def tail(
    last: Annotated[int, typer.Option("-n", "--last", help="Records per partition to go back.")] = 10,
    everything: Annotated[bool, typer.Option("--all", help="Begin where the log begins.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with records as they come.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    home: Annotated[Path | None, typer.Option(help="Home folder of the running stack (default .trirank).")] = None,
) -> None:
    """Show the newest records of the stream: where, when, what is done to which table, and how they are ordered."""
    from infra.commands import update_log

    state = running(load_settings(home=home))
    release = read_release(Path(state.release), verify_files=False)
    names = {entry.table_id: entry.name for entry in release.manifest.tables}
    found = update_log.records(
        state.kafka, f"{state.stack}.embeddings", state.partitions, last=None if everything else last, follow=follow
    )
    about = (update_log.about_update(record, names) for record in found)
    if not update_log.show(about, update_log.update_line, as_json=as_json) and not as_json:
        print("no updates yet")


@app.command()
def deadletters(
    last: Annotated[int, typer.Option("-n", "--last", help="Letters to go back.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="All letters the log still has.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with letters as they come.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    home: Annotated[Path | None, typer.Option(help="Home folder of the running stack (default .trirank).")] = None,
) -> None:
    """Show records that could not be applied: the reason, where they were, and the detail."""
    from infra.commands import update_log

    state = running(load_settings(home=home))
    found = update_log.records(
        state.kafka, f"{state.stack}.deadletter", 1, last=None if everything else last, follow=follow
    )
    about = (update_log.about_letter(record) for record in found)
    if not update_log.show(about, update_log.letter_line, as_json=as_json) and not as_json:
        print("no dead letters")


def running(settings: Settings) -> StackState:
    """The running stack of this home folder. Raises ConfigurationError."""
    state = read_state(settings)
    if state is None:
        raise ConfigurationError(f"home: no stack is running in {settings.home}; `trirank up` starts one")
    return state


def _entry(release: Release, table: str) -> TableEntry:
    for entry in release.manifest.tables:
        if entry.name == table:
            return entry
    names = ", ".join(entry.name for entry in release.manifest.tables)
    raise InvalidInput("table", f"release {release.manifest.name} has no table {table}; it has {names}")


def _register(state: StackState, rows: UpdateRows) -> None:
    """Items the release does not know need a name before a reply can show them."""
    from feature_service.store import register_items

    if rows.ids is None or rows.titles is None:
        return
    categories = rows.categories or [[] for _ in rows.ids]
    items = zip(rows.ids, rows.keys.tolist(), rows.titles, categories, strict=True)
    register_items(state.redis, state.stack, [Item(i, key, title, cats, 0) for i, key, title, cats in items])


async def _wait_visible(state: StackState, release: Release, table: str, rows: UpdateRows, op: Operation) -> None:
    """Look the rows up, over the wire as a gateway does, until they are what was published."""
    from infra.deadline import Deadline
    from infra.directory import read_directory
    from infra.wire.client import WireClient
    from infra.wire.connection import Peer
    from param_server.client import ParameterClient
    from param_server.specs import table_specs

    shards = [entry for entry in read_directory(state.redis, state.stack) if entry.role == "shard"]
    wire = WireClient(role="shard")
    try:
        wire.set_peers([Peer(e.name, e.address, e.release, e.meta) for e in shards])
        await wire.wait_live(state.shards, release=release.manifest.name, deadline=Deadline.after(5.0))
        client = ParameterClient(wire, state.shards, state.partitions, table_specs(release))
        keys, wanted = _newest(rows)
        end_s = time.monotonic() + _VISIBLE_TIMEOUT_S
        while time.monotonic() < end_s:
            got = await client.fetch(
                generation=release.manifest.generation, lookups=[(table, keys)], topk=None, deadline=Deadline.after(1.0)
            )
            if op is Operation.DELETE:
                seen = not got.found[0].any()
            else:
                seen = bool(got.found[0].all()) and np.array_equal(got.rows[0], wanted)
            if seen:
                return
            await asyncio.sleep(0.0005)
    finally:
        await wire.close()
    raise TrirankError(
        f"not visible after {_VISIBLE_TIMEOUT_S:.0f} s: see dead letters and lag in `trirank status`, "
        "and whether a newer version of these rows was published"
    )


def _newest(rows: UpdateRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The last 1,024 rows of the file, of each key its last: that is what stays."""
    keys = rows.keys[::-1][:1024]
    _, first = np.unique(keys, return_index=True)
    return keys[first], rows.rows[::-1][:1024][first] if rows.rows.size else rows.rows
