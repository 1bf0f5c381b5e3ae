"""Waiting until lookups see what was published, over the wire as a gateway does.

Connected before anything is sent, so that the time is the stream's and not that of this process. Gives up with a
TrirankError that says where to look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.commands.update_file import UpdateRows
from infra.deadline import Deadline
from infra.directory import read_directory
from infra.errors import TrirankError
from infra.release import Release
from infra.state import StackState
from infra.wire import Peer, WireClient
from param_server.client import ParameterClient
from param_server.specs import table_specs

_TIMEOUT_S = 30.0
_CHECKED_ROWS = 1024
_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Seen:
    """How long it took: since the first byte was handed to the producer, and since the broker had everything."""

    since_start_ms: float
    since_acknowledged_ms: float


async def until_visible(
    state: StackState, release: Release, table: str, rows: UpdateRows, send: Callable[[], float], *, deleted: bool
) -> Seen:
    """Connect to every shard, call `send` (it returns the monotonic second of the acknowledgement), look until seen."""
    shards = [entry for entry in read_directory(state.redis, state.stack) if entry.role == "shard"]
    wire = WireClient(role="shard")
    try:
        name = release.manifest.name
        wire.set_peers([Peer(e.name, e.address, e.release, e.meta) for e in shards if e.release == name])
        await wire.wait_live(state.shards, release=name, deadline=Deadline.after(5.0))
        client = ParameterClient(wire, state.shards, state.partitions, table_specs(release))
        keys, wanted = _newest(rows)
        started_s = time.monotonic()
        acknowledged_s = await asyncio.to_thread(send)
        while time.monotonic() < acknowledged_s + _TIMEOUT_S:
            got = await client.fetch(
                generation=release.manifest.generation, lookups=[(table, keys)], topk=None, deadline=Deadline.after(1.0)
            )
            found = got.found[0]
            if not found.any() if deleted else found.all() and np.array_equal(got.rows[0], wanted):
                now_s = time.monotonic()
                return Seen((now_s - started_s) * 1e3, (now_s - acknowledged_s) * 1e3)
            await asyncio.sleep(_EVERY_S)
    finally:
        await wire.close()
    raise TrirankError(
        f"not visible after {_TIMEOUT_S:.0f} s: see dead letters and lag in `trirank status`, and whether a newer "
        "version of these rows was published"
    )


def _newest(rows: UpdateRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The last rows of the file, of each key its last: that is what stays."""
    keys = rows.keys[::-1][:_CHECKED_ROWS]
    _, first = np.unique(keys, return_index=True)
    return keys[first], rows.rows[::-1][:_CHECKED_ROWS][first] if rows.rows.size else rows.rows
