"""Writes to a GPU table: a batch is staged (brought to the device, in order of version), then written in stream order.

Writing is three kernels at most and one wait for the counts. `gpu_staging.py` stages ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from param_server.contract import I64, U64, Op
from param_server.table import Applied, Bool, Export, RowBatch
from param_server.table.gpu_arrays import Arrays, keys_of
from param_server.table.gpu_capture import Changes
from param_server.table.gpu_host import Fetch, to_device, to_host
from param_server.table.gpu_launch import Gone, Launcher, Staged
from param_server.table.tier import Entries, room_for

_NO_KEYS = np.empty(0, np.int64)
_STALE = -1
_TOMBSTONE = 2
# Below this load hardly any key is far from home.
_TIDY_LOAD = 0.5


@dataclass(frozen=True, slots=True)
class Pending:
    """A write that was launched: its codes, first mark and overflow flags on the device, and its counts on the way."""

    staged: Staged
    codes: Tensor
    mark: int
    over: Tensor | None
    counts: Fetch


class Writer(Launcher):
    """The one writer of the arrays of a table; counts what is in them."""

    def __init__(self, arrays: Arrays, dim: int, capacity_rows: int, *, evicting: bool) -> None:
        super().__init__(arrays, dim, evicting=evicting)
        self._capacity = capacity_rows
        self.changes = Changes(arrays, dim, chain=not evicting)
        self.live = 0
        self.used = 0

    def apply(self, batch: RowBatch) -> Applied:
        """Write the batch; an evicting table reports keys it does not hold as `full`."""
        return self.write(self.stage(batch))

    def stage(self, batch: RowBatch) -> Staged:
        """Bring a batch to the device. Raises ValueError when its arrays do not fit."""
        keys, versions, order = in_order(batch, self._dim)
        device = self._arrays.words.device
        return Staged(
            batch.op,
            to_device(keys, np.int64, device),
            to_device(versions, np.uint64, device),
            None if batch.op is Op.DELETE else to_device(batch.rows, np.float32, device),
            None if order is None else to_device(order, np.int64, device),
            batch.versioned_rows,
        )

    def write(self, staged: Staged) -> Applied:
        """Write a staged batch and wait for the counts."""
        return self.finish(self.begin(staged))

    def begin(self, staged: Staged) -> Pending:
        """Launch the write of a batch, after `finish` of the one before; lookups that come later see all of it."""
        counters = self.new_counters()
        codes, mark, over = staged.keys, 0, None
        if staged.keys.numel():
            insert, gate = self._admit(staged)
            self.changes.before(staged.keys)
            if staged.op is Op.ADD:
                codes = self.claim(staged.keys, counters, gate, insert=insert)
                over = self.accumulate(staged, codes, counters)
                self.changes.after(codes)
            else:
                codes, mark = self.put(staged, counters, gate, insert=insert, stamp=self.changes.stamp)
                self.settle(staged, codes, mark, counters)
        return Pending(staged, codes, mark, over, Fetch([counters] if over is None else [counters, over]))

    def finish(self, pending: Pending) -> Applied:
        """Wait for a write and count what it did."""
        before = self.used
        done = self._report(pending)
        crowded = self.used > before and self.used > _TIDY_LOAD * self._arrays.n_slots
        if crowded and pending.over is None and not self.changes.still:
            self.tidy(pending.staged.keys, pending.codes, pending.mark)
        return done

    def upsert(
        self, batch: RowBatch, scores: NDArray[np.uint32], dirty: Bool | None = None, *, force: bool = True
    ) -> tuple[Applied, Entries]:
        """Assign, evicting where there is no room (without `force`: only rows of lesser score); what had to leave.

        `dirty` bool[n]: whether each differs from what is below; None: all. Raises ValueError when the batch or the
        table is of another kind.
        """
        if not self._evicting or batch.op is not Op.ASSIGN or scores.size != batch.keys.size:
            raise ValueError("upsert assigns rows with a score each to an evicting table")
        staged = self.stage(batch)
        if batch.keys.size == 0:
            return Applied(0, 0, _NO_KEYS, _NO_KEYS), room_for(0, self._dim)
        device = staged.keys.device
        counters = self.new_counters()
        ranks = self._in_its_order(staged, to_device(scores, np.uint32, device))
        changed = None if dirty is None else self._in_its_order(staged, to_device(dirty, np.uint8, device))
        self.changes.before(staged.keys)
        codes, mark = self.put(staged, counters, None, insert=False, scores=ranks)
        gone = self.replace(staged, codes, mark, ranks, counters, force=force)
        self.settle(staged, codes, mark, counters, ranks)
        self.changes.after(codes, mark, changed)
        return self._report(Pending(staged, codes, mark, None, Fetch([counters]))), self._left(gone)

    def remove(self, keys: I64, above: int = -1, *, dead: bool = False) -> Entries:
        """Take out those of keys that are held with a score greater than `above` (with `dead`: tombstones only)."""
        if not keys.size:
            return room_for(0, self._dim)
        left = self._left(self.take_out(to_device(keys, np.int64, self.device), above, dead=dead))
        self.used -= left.n
        self.live -= int(np.count_nonzero(~left.tombstones))
        return left

    def warm(self) -> None:
        """Compile every kernel a write can need, by launching it on nothing."""
        device = self._arrays.words.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        rows = torch.empty((0, self._dim), dtype=torch.float32, device=device)
        counters = self.new_counters()
        insert = not self._evicting
        for op, written in ((Op.ASSIGN, rows), (Op.DELETE, None)):
            for order in (None, none):
                staged = Staged(op, none, none, written, order)
                for gate in (None, none.to(torch.uint8)):
                    codes, mark = self.put(staged, counters, gate, insert=insert)
                self.settle(staged, codes, mark, counters)
                if self._evicting and op is Op.ASSIGN:
                    scores = none.to(torch.int32)
                    self.put(staged, counters, None, insert=False, scores=scores)
                    for force in (True, False):
                        self.replace(staged, codes, mark, scores, counters, force=force)
                    self.settle(staged, codes, mark, counters, scores)
        for gate in (None, none.to(torch.uint8)):
            self.claim(none, counters, gate, insert=insert)
        self.claim(none, counters, None, insert=False)
        for versioned in (True, False):
            self.accumulate(Staged(Op.ADD, none, none, rows, versioned_rows=versioned), none, counters)
        self.tidy(none, none, 1)
        self.changes.warm()
        if self._evicting:
            for dead in (True, False):
                self.take_out(none, -1, dead=dead)

    def _report(self, pending: Pending) -> Applied:
        codes, order = pending.codes, pending.staged.order
        counts, *flags = pending.counts.wait()
        applied, live_change, inserted, refused, _ = (int(count) for count in counts.sum(1))
        self.live += live_change
        self.used += inserted
        full = overflow = _NO_KEYS
        if refused:
            places = (codes < _STALE).nonzero()[:, 0]
            full = np.sort(to_host([places if order is None else order[places]])[0])
        if flags:
            overflow = np.flatnonzero(flags[0])
        return Applied(applied, codes.numel() - applied - full.size - overflow.size, full, overflow)

    def _admit(self, staged: Staged) -> tuple[bool, Tensor | None]:
        """Whether new keys may enter at all, and if not all of them: which, u8[n]."""
        room = self._capacity - self.used
        if self._evicting or staged.keys.numel() <= room:
            return not self._evicting, None
        missing = self.claim(staged.keys, self.new_counters(), None, insert=False) < _STALE
        n_missing = int(missing.sum())
        return n_missing > 0, None if n_missing <= room else self._gate(staged, missing, room)

    def _gate(self, staged: Staged, missing: Tensor, room: int) -> Tensor:
        """Which keys may enter a table that has not room for all: u8[n]."""
        n = missing.numel()
        order = torch.arange(n, device=missing.device) if staged.order is None else staged.order
        keys, new, position = to_host([staged.keys, missing, order])
        # An add goes forward. An assign goes backward, as the last position of a key is the one that counts.
        names = keys[new][np.argsort(position[new] if staged.op is Op.ADD else -position[new])]
        _, met = np.unique(names, return_index=True)
        entering = names[np.sort(met)][:room]
        return to_device(~new | np.isin(keys, entering), np.uint8, staged.keys.device)

    def _left(self, gone: Gone) -> Entries:
        """What has left, on the host; a capture under way keeps what belongs to it."""
        at = gone.words.nonzero()[:, 0]
        words, slots = gone.words[at], gone.slots[at]
        dead = (words >> 62 & 3) == _TOMBSTONE
        # Nobody has written the rows of tombstones.
        rows = torch.where(dead[:, None], 0.0, gone.rows[at])
        columns = [keys_of(words, slots, self._arrays.n_buckets), slots, gone.versions[at], gone.scores[at]]
        keys, places, versions, scores, stamps, tombstones, values = to_host([*columns, gone.stamps[at], dead, rows])
        left = Export(keys, versions.view(np.uint64), tombstones, values)
        self.changes.gone(places, stamps, left)
        dirty = (stamps & 1).astype(np.bool_)
        return Entries(keys, left.versions, tombstones, values, scores.view(np.uint32), dirty)

    @staticmethod
    def _in_its_order(staged: Staged, values: Tensor) -> Tensor:
        return values if staged.order is None else values[staged.order]


def in_order(batch: RowBatch, dim: int) -> tuple[I64, U64, I64 | None]:
    """Keys and versions in ascending order of version, and the positions they had (None: they were in order).

    An add stays as it came. Raises ValueError when the arrays of the batch do not fit a table of this dim.
    """
    n = batch.keys.size
    if batch.rows.shape != (0 if batch.op is Op.DELETE else n, dim) or batch.versions.size != n:
        raise ValueError(f"{n} keys, {batch.versions.size} versions, rows {batch.rows.shape}, dim {dim}")
    keys, versions = batch.keys, batch.versions
    if batch.op is Op.ADD or not (versions[1:] < versions[:-1]).any():
        return keys, versions, None
    order = np.argsort(versions, kind="stable")
    return keys[order], versions[order], order
