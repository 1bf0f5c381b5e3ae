"""How much of the tables of a shard is memory of this process alone, and how much other processes may share.

The kernel knows: pages of an image that were written to here are anonymous memory, the others are the file's. Asking it
takes about 20 ms for a gigabyte, so a thread asks, in pieces that hold up nobody, every ten seconds while somebody
looks. Where the kernel does not say (`pagemap` is Linux's) both numbers are None: unknown.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infra.clock import Clock
from param_server import metrics
from param_server.images import Images
from param_server.table import EmbeddingTable
from param_server.table.image import Span

_PAGEMAP = Path("/proc/self/pagemap")
_EVERY_S = 10.0
# Of the time of a core; larger tables are looked at less often.
_MOST_SHARE = 0.005
# The kernel gives u64 for each page: present, in swap, of a file.
_PAGES_AT_ONCE = 8192
_OF_A_FILE, _ANY = np.uint64(1 << 61), np.uint64(3 << 62)


def shared_and_private(span: Span, pagemap: Path = _PAGEMAP) -> tuple[int, int] | None:
    """Bytes of a table that are as the file of its image has them, in memory or to be read, and bytes that are memory
    of this process alone: copied, or behind the last entry of the image. None where the kernel does not say."""
    try:
        with pagemap.open("rb", buffering=0) as file:
            copied = sum(_anonymous_bytes(file.fileno(), *part) for part in span.of_the_file)
            behind = sum(_anonymous_bytes(file.fileno(), *part) for part in span.behind)
    except OSError:
        return None
    return sum(length for _, length in span.of_the_file) - copied, copied + behind


def _anonymous_bytes(pagemap: int, start: int, length: int) -> int:
    first, last = start // mmap.PAGESIZE, (start + length) // mmap.PAGESIZE
    found = 0
    for page in range(first, last, _PAGES_AT_ONCE):
        n = min(_PAGES_AT_ONCE, last - page)
        raw = os.pread(pagemap, 8 * n, 8 * page)
        if len(raw) != 8 * n:
            raise OSError("the kernel does not say")
        pages = np.frombuffer(raw, np.uint64)
        found += int(np.count_nonzero((pages & _OF_A_FILE == 0) & (pages & _ANY != 0)))
    return found * mmap.PAGESIZE


class Residence:
    """Sizes of the tables of one shard; those that are not in one of the `images` are private. For the owner thread."""

    def __init__(self, images: Images | None, clock: Clock) -> None:
        self._images = images
        self._clock = clock
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._known: Mapping[str, tuple[int, int] | None] = {}

    def health(self, tables: Mapping[str, EmbeddingTable]) -> dict[str, Any]:
        """`tables` by name, and the sums in `memory`, with `not_shared`: why a table has no image. None: unknown."""
        found: dict[str, dict[str, Any]] = {
            name: {
                "rows": table.size,
                "tombstones": table.tombstones,
                "capacity_rows": table.capacity_rows,
                "bytes": table.bytes,
                **self._sizes(name, table),
            }
            for name, table in tables.items()
        }
        memory: dict[str, Any] = {"images": len(self._images.mapped) if self._images else 0}
        for part in ("shared_bytes", "private_bytes"):
            known = [n for table in found.values() if (n := table[part]) is not None]
            memory[part] = sum(known) if len(known) == len(found) else None
        return {
            "tables": found,
            "memory": memory,
            "not_shared": dict(self._images.private) if self._images else {},
        }

    def observe(self, shard: str, tables: Mapping[str, EmbeddingTable]) -> None:
        """Set the gauges of the tables, as far as numbers are known."""
        for name, table in tables.items():
            metrics.TABLE_ROWS.labels(shard, name).set(table.size)
            for part, size in self._sizes(name, table).items():
                if size is not None:
                    metrics.TABLE_BYTES.labels(shard, name, part.removesuffix("_bytes")).set(size)

    def _sizes(self, name: str, table: EmbeddingTable) -> dict[str, int | None]:
        if self._images is None or name not in self._images.mapped:
            return {"shared_bytes": 0, "private_bytes": table.bytes}
        self._look(self._images.mapped)
        shared, private = self._known.get(name) or (None, None)
        return {"shared_bytes": shared, "private_bytes": private}

    def _look(self, mapped: Mapping[str, Span]) -> None:
        """Have a thread look, when it is time; what it found is there next time."""
        if self._clock.monotonic_s() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._ask, args=(dict(mapped),), name="residence", daemon=True)
        self._thread.start()

    def _ask(self, mapped: Mapping[str, Span]) -> None:
        start_s = self._clock.monotonic_s()
        self._known = {name: shared_and_private(span) for name, span in mapped.items()}
        end_s = self._clock.monotonic_s()
        self._due_s = end_s + max(_EVERY_S, (end_s - start_s) / _MOST_SHARE)
