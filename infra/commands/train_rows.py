"""The rows of a running stack, for `trirank train --rows-from-stack`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.clock import SystemClock
from infra.commands.updates import running
from infra.directory import read_directory
from infra.kafka import LogProducer
from infra.release import read_release
from infra.settings import Settings
from infra.wire import Peer
from param_server.specs import table_specs
from reranker.remote.empty import check_holds_no_trained_rows
from reranker.remote.stack import StackRows
from reranker.remote.training import RemoteRows


@contextmanager
def rows_of_stack(settings: Settings, staleness: int) -> Iterator[RemoteRows]:
    """Rows in the shards of the stack of this home folder. Raises ConfigurationError, RowsRefused, RowsUnavailable."""
    state = running(settings)
    release = read_release(Path(state.release), verify_files=False)
    check_holds_no_trained_rows(release)
    manifest = release.manifest

    def shards() -> list[Peer]:
        entries = read_directory(state.redis, state.stack)
        mine = [e for e in entries if e.role == "shard" and e.generation == manifest.generation]
        return [Peer(e.name, e.address, e.release, e.meta) for e in mine]

    log = LogProducer(state.kafka)
    log.start()
    try:
        rows = StackRows(
            shards,
            log,
            topic=f"{state.stack}.embeddings",
            generation=manifest.generation,
            schema_fingerprint=manifest.schema_fingerprint,
            specs=table_specs(release),
            n_shards=state.shards,
            n_partitions=state.partitions,
            clock=SystemClock(),
        )
        rows.start()
        try:
            yield RemoteRows(rows, staleness)
        finally:
            rows.close()
    finally:
        log.close()
