"""One method for each kernel that writes a table: what it is given, how it is launched. Nothing here waits.

The kernels of one batch run in this order: `put` (then `replace` in an evicting table), `settle`, and `tidy` where keys
were inserted; or `claim` and `accumulate` for an add.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from param_server.contract import Op
from param_server.table.gpu_arrays import Arrays
from param_server.table.kernels_add import accumulate_kernel
from param_server.table.kernels_claim import claim_kernel
from param_server.table.kernels_replace import replace_kernel
from param_server.table.kernels_tidy import tidy_kernel
from param_server.table.kernels_tier import take_out_kernel
from param_server.table.kernels_write import settle_kernel, write_kernel

_COUNTERS = (5, 64)
_MOST_MARKS = 2**31 - 1
_KEYS = 32
# Numbers of a tile of rows: one tile fills half the registers of a warp. A kernel with two at once takes half.
_TILE_NUMBERS = 2048


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch on the device: keys i64[n], versions i64[n] (bits of u64, ascending unless it adds), rows f[n, dim] (None
    for a delete). `order` i64[n]: keys and versions are those of order[i] in the batch and in rows; None: in order."""

    op: Op
    keys: Tensor
    versions: Tensor
    rows: Tensor | None
    order: Tensor | None = None
    versioned_rows: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """What left, on the device, at the positions of the batch: words i64[n] (0: nothing left), slots, versions, scores
    and stamps i32[n], rows."""

    words: Tensor
    slots: Tensor
    versions: Tensor
    scores: Tensor
    stamps: Tensor
    rows: Tensor


class Launcher:
    """Launches the writing kernels on the arrays of one table."""

    def __init__(self, arrays: Arrays, dim: int, *, evicting: bool) -> None:
        self._arrays = arrays
        self._dim = dim
        self._evicting = evicting
        self._next_mark = 1

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._dim

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        return self._arrays.words.device

    def new_counters(self) -> Tensor:
        """Zeros for the kernels of one batch to count in."""
        return torch.zeros(_COUNTERS, dtype=torch.int64, device=self._arrays.words.device)

    def put(
        self, staged: Staged, counters: Tensor, gate: Tensor | None, *, insert: bool, scores: Tensor | None = None,
        stamp: int = 1,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Assign or delete as if no key came twice; return codes i64[n] and the first mark. `settle` comes after.

        `gate` u8[n] says which new keys may enter; scores i32[n] are in the order of the keys; `stamp` is that of
        `gpu_capture.Changes`.
        """
        a = self._arrays
        n = staged.keys.numel()
        mark = self._take_marks(n)
        codes = torch.empty_like(staged.keys)
        shape = self._shape()
        write_kernel[_grid(n, shape["K"])](
            staged.keys, staged.versions, staged.order, staged.rows, scores, gate, codes,
            a.words, a.records, a.marks, a.scores, a.stamps, a.rows, a.scales, counters, n, a.n_buckets, mark, stamp,
            STRIDE=a.stamp_stride, INSERT=insert, CHAIN=not self._evicting, GATED=gate is not None,
            DELETE=staged.op is Op.DELETE, SCORED=scores is not None, ORDERED=staged.order is None,
            num_warps=1, **shape,
        )  # fmt: skip
        return codes, mark

    def replace(
        self, staged: Staged, codes: Tensor, mark: int, scores: Tensor, counters: Tensor, *, keep_rows: bool = True,
        force: bool = True,
    ) -> Gone:  # fmt: skip
        """Write what `put` has not found, evicting (without `force`: only rows of lesser score). Without `keep_rows`
        the rows of what leaves are not copied."""
        a = self._arrays
        n = codes.numel()
        gone = self._room_for(codes, n if keep_rows else 0)
        shape = self._shape(_TILE_NUMBERS // 2)
        replace_kernel[_grid(n, shape["K"])](
            staged.keys, staged.versions, staged.order, staged.rows, scores, codes,
            a.words, a.records, a.marks, a.scores, a.stamps, a.rows, a.scales,
            gone.words, gone.slots, gone.versions, gone.scores, gone.stamps, gone.rows, counters, n, a.n_buckets, mark,
            ORDERED=staged.order is None, KEEP_ROWS=keep_rows, FORCE=force, num_warps=1, **shape,
        )  # fmt: skip
        return gone

    def take_out(self, keys: Tensor, above: int, *, dead: bool) -> Gone:
        """Empty the places of keys i64[n] with a score greater than `above` (with `dead`: of tombstones among them)."""
        a = self._arrays
        n = keys.numel()
        gone = self._room_for(keys, n)
        shape = self._shape(_TILE_NUMBERS // 2)
        take_out_kernel[_grid(n, shape["K"])](
            keys, a.words, a.records, a.scores, a.stamps, a.rows, a.scales,
            gone.words, gone.slots, gone.versions, gone.scores, gone.stamps, gone.rows, n, a.n_buckets, above,
            DEAD=dead, num_warps=1, **shape,
        )  # fmt: skip
        return gone

    def settle(self, staged: Staged, codes: Tensor, mark: int, counters: Tensor, scores: Tensor | None = None) -> None:
        """Make the last position of every key the one that counts, if `counters` say that a key came twice."""
        a = self._arrays
        n = codes.numel()
        shape = self._shape()
        settle_kernel[_grid(n, shape["K"])](
            codes, staged.versions, staged.order, staged.rows, scores,
            a.words, a.records, a.marks, a.scores, a.rows, a.scales, counters, n, mark,
            DELETE=staged.op is Op.DELETE, SCORED=scores is not None, ORDERED=staged.order is None,
            num_warps=1, **shape,
        )  # fmt: skip

    def claim(self, keys: Tensor, counters: Tensor, gate: Tensor | None, *, insert: bool) -> Tensor:
        """Codes i64[n] of the slots of keys; with `insert`, new ones get a slot but no row."""
        n = keys.numel()
        codes = torch.empty_like(keys)
        claim_kernel[_grid(n, _KEYS)](
            keys, gate, codes, self._arrays.words, counters, n, self._arrays.n_buckets,
            K=_KEYS, INSERT=insert, CHAIN=not self._evicting, GATED=gate is not None, num_warps=1,
        )  # fmt: skip
        return codes

    def tidy(self, keys: Tensor, codes: Tensor, mark: int) -> None:
        """Bring home the keys that `put` has just inserted far from it."""
        a = self._arrays
        n = codes.numel()
        shape = self._shape()
        tidy_kernel[_grid(n, shape["K"])](
            keys, codes, a.words, a.records, a.marks, a.rows, a.scales, n, a.n_buckets, mark, num_warps=1, **shape
        )

    def accumulate(self, staged: Staged, codes: Tensor, counters: Tensor) -> Tensor:
        """Add rows to the slots that `claim` found; return u8[n], set where a sum would not be finite."""
        a = self._arrays
        n = codes.numel()
        over = torch.zeros(n, dtype=torch.uint8, device=codes.device)
        # Stable: the addends of one key stay in the order of the batch.
        neighbours, order = torch.sort(codes, stable=True)
        shape = self._shape()
        accumulate_kernel[_grid(n, shape["K"])](
            neighbours, order, staged.versions, staged.rows, over, a.words, a.versions, a.rows, a.scales, counters, n,
            VERSIONED=staged.versioned_rows, num_warps=1, **shape,
        )  # fmt: skip
        return over

    def _room_for(self, codes: Tensor, n_rows: int) -> Gone:
        words, slots, versions = (torch.empty_like(codes) for _ in range(3))
        scores, stamps = (torch.empty_like(codes, dtype=torch.int32) for _ in range(2))
        rows = torch.empty((n_rows, self._dim), dtype=torch.float32, device=codes.device)
        return Gone(words, slots, versions, scores, stamps, rows)

    def _take_marks(self, n: int) -> int:
        if self._next_mark > _MOST_MARKS - n:
            self._arrays.marks.zero_()
            self._next_mark = 1
        first = self._next_mark
        self._next_mark += n
        return first

    def _shape(self, numbers: int = _TILE_NUMBERS) -> dict[str, int]:
        block_d = triton.next_power_of_2(self._dim)
        return {
            "D": self._dim,
            "BLOCK_D": block_d,
            "K": max(1, min(_KEYS, numbers // block_d)),
            "SCALED": self._arrays.scales is not None,
        }


def _grid(n: int, per_program: int) -> tuple[int]:
    return (max(1, triton.cdiv(n, per_program)),)
