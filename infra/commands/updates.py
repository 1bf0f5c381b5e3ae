"""`trirank updates`: put embedding rows on the stream, and see when they are visible."""

from __future__ import annotations

import asyncio
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from infra.commands.update_file import UpdateRows, read_rows
from infra.commands.visible import until_visible
from infra.errors import ConfigurationError, InvalidInput
from infra.release import Item, Release, TableEntry, read_release
from infra.settings import Settings, load_settings
from infra.state import StackState, read_state

app = typer.Typer(help="Embedding updates on the stream.", no_args_is_help=True)
_CHUNK_ROWS = 16384


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

    if wait and op is Operation.ADD:
        raise ConfigurationError("wait: what an add leads to depends on the row before it; wait for assign or delete")
    state = running(load_settings(home=home))
    release = read_release(Path(state.release), verify_files=False)
    entry = _entry(release, table)
    rows = read_rows(file, table, entry.dim, with_rows=op is not Operation.DELETE)
    _register(state, rows)
    log = LogProducer(state.kafka)
    log.start()

    def send() -> float:
        """Publish everything; the moment it was acknowledged."""
        publisher = Publisher(log, f"{state.stack}.embeddings", state.partitions)
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
        return time.monotonic()

    try:
        if wait:
            seen = asyncio.run(until_visible(state, release, table, rows, send, deleted=op is Operation.DELETE))
            print(f"{rows.keys.size} rows of table {table}: visible after {seen.since_start_ms:.1f} ms, "
                  f"{seen.since_acknowledged_ms:.1f} ms after the broker acknowledged them")  # fmt: skip
        else:
            started_s = time.monotonic()
            acknowledged_ms = (send() - started_s) * 1e3
            print(f"{rows.keys.size} rows of table {table} acknowledged after {acknowledged_ms:.1f} ms")
    finally:
        log.close()


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
