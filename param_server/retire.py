"""What releases that are no longer served leave behind: cold rows in Redis, snapshots of those served beside, images.

Keeps a generation that is served, and one of which the stack's own shards still have a snapshot, because a start with
its release would go on from that. Invariant: a generation that is begun to be dropped is not taken for whole again: its
id goes first, and a shard that finds another id knows that rows are gone.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from infra.errors import ReleaseRefused
from infra.redis import connect, redis_errors
from infra.release import Release, read_release
from infra.settings import Settings
from param_server.images import drop_images, image_folder, image_names
from param_server.snapshot import SnapshotRefused, numbers, read_manifest

logger = logging.getLogger(__name__)

_AT_ONCE = 1000
_SIDE = re.compile(r"[0-9a-f]{8}")


def tidy(settings: Settings, redis_url: str, served: Iterable[Path]) -> None:
    """Drop what no release in the `served` directories uses; nothing while one of them cannot be read. Raises
    RedisUnavailable."""
    try:
        releases = [read_release(path, verify_files=False) for path in served]
    except ReleaseRefused as error:
        logger.warning("what is no longer served is kept: a release cannot be read", extra={"reason": error})
        return
    drop_unserved_images(settings, releases)
    if settings.tier_hot_bytes is not None and settings.tier_cold:
        generations = {release.manifest.generation for release in releases}
        drop_unserved(redis_url, settings.stack, settings.run_dir / "snapshots", generations)


def drop_unserved(redis_url: str, stack: str, snapshots: Path, served: Collection[int]) -> list[int]:
    """Drop what is left of generations that are neither `served` nor in snapshots of the stack's own shards; which had
    cold rows. `snapshots` is the folder with one folder per stack and side. Raises RedisUnavailable."""
    for folder in snapshots.glob(f"{stack}.*"):
        side = folder.name.removeprefix(f"{stack}.")
        if _SIDE.fullmatch(side) and int(side, 16) not in served:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("snapshots of a release that is no longer served are dropped", extra={"folder": folder})
    kept = {*served, *_in_snapshots(snapshots / stack)}
    with redis_errors(), connect(redis_url) as client:
        dropped = sorted(_generations(client, stack) - kept)
        for generation in dropped:
            n = _drop(client, f"{stack}:c:{generation}")
            for note in (snapshots / stack).glob(f"of-*/shard-*/cold-id-{generation}.*"):
                note.unlink(missing_ok=True)
            logger.info("a generation's cold rows are dropped", extra={"generation": generation, "keys": n})
    return dropped


def drop_unserved_images(settings: Settings, served: Iterable[Release]) -> list[str]:
    """Remove the table images of the stack that none of the `served` releases uses; their names. Raises ReleaseRefused.

    A shard that has one of them mapped keeps it; one that starts later builds it again.
    """
    kept = [
        image_names(
            release, n_shards=settings.shards, n_partitions=settings.partitions,
            headroom=settings.table_headroom, min_capacity_rows=settings.table_min_capacity_rows,
        )
        for release in served if settings.table_images
    ]  # fmt: skip
    return drop_images(image_folder(settings), set().union(*kept))


def _in_snapshots(root: Path) -> Iterator[int]:
    for folder in root.glob("of-*/shard-*"):
        for number in numbers(folder):
            try:
                yield read_manifest(folder / f"snap-{number:012d}").manifest.owner.generation
            except SnapshotRefused:
                continue


def _generations(client: Any, stack: str) -> set[int]:
    # Names that end in #id, #floors or #hot: rows are many, and their names hold arbitrary bytes.
    prefix = f"{stack}:c:".encode()
    named = re.compile(re.escape(prefix) + rb"(\d+)(?::\d+)?#(?:id|floors|hot)")
    names = client.scan_iter(match=prefix + b"*#*", count=_AT_ONCE)
    return {int(match[1]) for name in names if (match := named.fullmatch(name))}


def _drop(client: Any, prefix: str) -> int:
    """The id, then the rows, last what says that there were any: so that an interrupted drop is gone on with."""
    client.unlink(f"{prefix}#id", f"{prefix}#gaps")
    last = [name for name in client.scan_iter(match=f"{prefix}:*#*", count=_AT_ONCE) if _is_note(name, prefix)]
    dropped = 1
    batch: list[bytes] = []
    for name in client.scan_iter(match=f"{prefix}:*", count=_AT_ONCE):
        if name not in last:
            batch.append(name)
        if len(batch) == _AT_ONCE:
            dropped += client.unlink(*batch)
            batch.clear()
    return dropped + (client.unlink(*batch, *last) if batch or last else 0)


def _is_note(name: bytes, prefix: str) -> bool:
    return re.fullmatch(re.escape(prefix.encode()) + rb":\d+#(?:floors|hot)", name) is not None
