"""Copying a GPU table of one moment in pieces, while it goes on changing; and what changed since another moment.

Every entry carries the stamp of its last change (`kernels_capture.py`). A capture walks the slots once; whoever is
about to change or lose an entry that belongs to it and was not given out has it copied aside first. Entries must not
move meanwhile: `tidy` is left out until a capture is over. Invariant: what `take` gives out is the table as it was when
the capture began, each entry once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from param_server.contract import I64
from param_server.table import Bool, Export
from param_server.table.gpu_arrays import Arrays, keys_of
from param_server.table.gpu_host import to_host
from param_server.table.kernels import gather_kernel
from param_server.table.kernels_capture import save_kernel, stamp_kernel

# A copy from the card costs its launch: pieces are larger than those of host memory.
_PIECES_AT_ONCE = 4
_LOOKED_AT = 1 << 20
_KEYS = 32
_TILE_NUMBERS = 1024
_TOMBSTONE = 2


@dataclass(frozen=True, slots=True)
class _Saved:
    """Copies of entries on the device, by position of a batch; word 0 where nothing was copied."""

    words: Tensor
    slots: Tensor
    versions: Tensor
    rows: Tensor


class GpuCapture:
    """Entries with a stamp in (low, high]; `number` is what a later capture takes as `since`."""

    def __init__(self, arrays: Arrays, dim: int, since: int, number: int) -> None:
        self._arrays = arrays
        self._dim = dim
        self._low, self._high = 2 * since + 1, 2 * number + 1
        self._next = 0
        self._listed: deque[tuple[Tensor, int]] = deque()
        self._saved: deque[_Saved] = deque()
        self._whole: deque[Export] = deque()
        self.number = number

    @property
    def over(self) -> bool:
        """Whether every slot was walked: nothing has to be copied aside any more."""
        return self._next >= self._arrays.n_slots

    def save(self, keys: Tensor, stamp: int, *, chain: bool) -> None:
        """Copy aside what keys i64[n] hold and stamp it; never waits."""
        n = keys.numel()
        if self.over or not n:
            return
        a = self._arrays
        copies = _Saved(
            torch.empty_like(keys), torch.empty_like(keys), torch.empty_like(keys),
            torch.empty((n, self._dim), dtype=torch.float32, device=keys.device),
        )  # fmt: skip
        block_d = triton.next_power_of_2(self._dim)
        k = max(1, min(_KEYS, _TILE_NUMBERS // block_d))
        save_kernel[(triton.cdiv(n, k),)](
            keys, a.words, a.records, a.stamps, a.rows, a.scales,
            copies.words, copies.slots, copies.versions, copies.rows,
            n, a.n_buckets, self._next, self._low, self._high, stamp,
            D=self._dim, BLOCK_D=block_d, K=k, CHAIN=chain, SCALED=a.scales is not None, STRIDE=a.stamp_stride,
            num_warps=1,
        )  # fmt: skip
        self._saved.append(copies)

    def gone(self, slots: I64, stamps: NDArray[np.int32], left: Export) -> None:
        """Keep those of the entries that have just left which belong here."""
        mine = np.flatnonzero((slots >= self._next) & (stamps > self._low) & (stamps <= self._high))
        if mine.size:
            self._whole.append(_chosen(left, mine))

    def take(self, most_rows: int) -> Export | None:
        """The next piece of about `most_rows` entries or a few times that, perhaps empty; None when all was given."""
        if self._whole:
            return self._whole.popleft()
        if self._saved:
            return self._from_saved(self._saved.popleft())
        if self._listed:
            return self._from_slots(*self._listed.popleft())
        if self.over:
            return None
        self._list(most_rows * _PIECES_AT_ONCE)
        return self._from_slots(*self._listed.popleft())

    def _list(self, most_rows: int) -> None:
        """Find the slots that belong here among the next ones, and divide them."""
        a = self._arrays
        end = min(self._next + _LOOKED_AT, a.n_slots)
        part = slice(self._next, end)
        stamps = a.stamps[part]
        belongs = ((a.words[part] >> 62 & 3) != 0) & (stamps > self._low) & (stamps <= self._high)
        slots = belongs.nonzero()[:, 0] + self._next
        pieces = [slots[at : at + most_rows] for at in range(0, max(1, slots.numel()), most_rows)]
        starts = to_host([slots[::most_rows]])[0].tolist()
        self._listed.extend(zip(pieces, [*starts[1:], end], strict=True))

    def _from_slots(self, slots: Tensor, then: int) -> Export:
        """What still belongs here of listed slots; the walk goes on at `then`."""
        self._next = then
        a = self._arrays
        words = a.words[slots]
        state = words >> 62 & 3
        columns = [keys_of(words, slots, a.n_buckets), a.versions[slots], state, a.stamps[slots]]
        rows = rows_at(a, torch.where(state == _TOMBSTONE, -1, slots), self._dim)
        keys, versions, states, stamps, values = to_host([*columns, rows])
        mine = np.flatnonzero((states != 0) & (stamps > self._low) & (stamps <= self._high))
        found = Export(keys, versions.view(np.uint64), states == _TOMBSTONE, values)
        return found if mine.size == keys.size else _chosen(found, mine)

    def _from_saved(self, saved: _Saved) -> Export:
        at = saved.words.nonzero()[:, 0]
        words = saved.words[at]
        columns = [keys_of(words, saved.slots[at], self._arrays.n_buckets), saved.versions[at]]
        keys, versions, dead, rows = to_host([*columns, (words >> 62 & 3) == _TOMBSTONE, saved.rows[at]])
        copied = Export(keys, versions.view(np.uint64), dead, rows)
        _, once = np.unique(keys, return_index=True)
        return copied if once.size == keys.size else _chosen(copied, once)


class Changes:
    """Stamps what changes in one table, and lets the capture under way know before."""

    def __init__(self, arrays: Arrays, dim: int, *, chain: bool) -> None:
        self._arrays = arrays
        self._dim = dim
        self._chain = chain
        self._number = 1
        self._capture: GpuCapture | None = None

    @property
    def still(self) -> bool:
        """Whether entries must stay where they are."""
        return self._capture is not None and not self._capture.over

    @property
    def stamp(self) -> int:
        """That of what changes now and differs from what is below."""
        return 2 * self._number + 1

    def mark(self) -> int:
        """A number to capture from: what changes from now on belongs to `capture(number)`."""
        number = self._number
        self._number += 1
        return number

    def capture(self, since: int = 0) -> GpuCapture:
        """Begin a copy of this moment. Ends the one before."""
        self._capture = GpuCapture(self._arrays, self._dim, since, self.mark())
        return self._capture

    def before(self, keys: Tensor) -> None:
        """Keys i64[n] are to change, or may be."""
        if self._capture is not None:
            self._capture.save(keys, 2 * self._number, chain=self._chain)

    def after(self, codes: Tensor, mark: int = 0, dirty: Tensor | None = None) -> None:
        """What `codes` i64[n] name has changed. `dirty` u8[n]: whether it differs from what is below, if not all of it
        does; `mark` is then the first one of the batch."""
        n = codes.numel()
        a = self._arrays
        stamp_kernel[(max(1, triton.cdiv(n, _KEYS)),)](
            codes, dirty, a.marks, a.stamps, n, mark, 2 * self._number + (dirty is None),
            K=_KEYS, STRIDE=a.stamp_stride, GIVEN=dirty is not None, num_warps=1,
        )  # fmt: skip

    def gone(self, slots: I64, stamps: NDArray[np.int32], left: Export) -> None:
        """Entries have left these slots, where they had these stamps."""
        if self._capture is not None:
            self._capture.gone(slots, stamps, left)

    def warm(self) -> None:
        """Compile what is called, by calling it on nothing."""
        none = torch.empty(0, dtype=torch.int64, device=self._arrays.words.device)
        for dirty in (None, none.to(torch.uint8)):
            self.after(none, 1, dirty)
        copying = GpuCapture(self._arrays, self._dim, 0, 0)
        copying.save(none.new_zeros(1), 0, chain=self._chain)


def rows_at(arrays: Arrays, slots: Tensor, dim: int) -> Tensor:
    """Rows f32[n, dim] of slots i64[n], zeros where they are negative."""
    out = torch.empty((slots.numel(), dim), dtype=torch.float32, device=slots.device)
    gather(arrays, slots, out)
    return out


def gather(arrays: Arrays, slots: Tensor, out: Tensor) -> None:
    """Fill out[n, dim] (f32 or the table's type) with the rows at slots i64[n], zeros where they are negative."""
    dim = out.shape[1]
    block_d = triton.next_power_of_2(dim)
    k = max(1, min(_KEYS, 8192 // (block_d * out.element_size())))
    if slots.numel():
        gather_kernel[(triton.cdiv(slots.numel(), k),)](
            slots, out, arrays.rows, arrays.scales, slots.numel(),
            D=dim, BLOCK_D=block_d, K=k, SCALED=arrays.scales is not None, num_warps=1,
        )  # fmt: skip


def _chosen(entries: Export, at: I64 | Bool) -> Export:
    return Export(entries.keys[at], entries.versions[at], entries.tombstones[at], entries.rows[at])
