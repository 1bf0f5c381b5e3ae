"""Which shapes a GPU engine computes: a grid of buckets, requests cut and padded to them. Pure.

A CUDA graph replays one shape, so every batch is run as the smallest bucket that holds it; what is too large is cut
into several. Refuses histories longer than the longest bucket: the caller cuts them to the newest. Invariant: the
pieces of a batch cover each of its scores once. What is computed beyond what was asked for is counted (`Grid.cells`),
and requests are put together so that it stays little (`infra.engine.batch.group`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.errors import Permanent

F32 = NDArray[np.float32]

# Offsets in a buffer are multiples of this many numbers (256 bytes), as GPUs like to read.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One shape: requests, history tokens, candidates."""

    batch: int
    length: int
    candidates: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests [first, last) and candidates [start, end) of a batch, computed as `bucket`."""

    first: int
    last: int
    start: int
    end: int
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of each axis, ascending: a `Batching` for engines that compute in buckets. A batch is rounded up
    by two fifths at most (17 to 24); the tiers' usual shapes, 50 tokens and 100, 200 or 500 candidates, fill 96 %."""

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    lengths: tuple[int, ...] = (25, 50, 100)
    candidates: tuple[int, ...] = (64, 104, 208, 320, 416, 512)

    def buckets(self) -> list[Bucket]:
        """All of them, largest first: the first one captured then needs the most memory, and the rest reuse it."""
        return [Bucket(*sizes) for sizes in sorted(product(self.batches, self.lengths, self.candidates), reverse=True)]

    @property
    def largest(self) -> Bucket:
        """It holds every piece."""
        return Bucket(self.batches[-1], self.lengths[-1], self.candidates[-1])

    @property
    def requests(self) -> int:
        """As many as the largest bucket holds: a GPU computes 32 users in little more time than one."""
        return self.batches[-1]

    @property
    def rows(self) -> int:
        """As many as the largest bucket holds."""
        return self.batches[-1] * self.candidates[-1]

    def size(self, candidates: int) -> int:
        """The candidates computed for so many."""
        return _computed(candidates, self.candidates)

    def cells(self, requests: int, length: int, candidates: int) -> int:
        """Those of all pieces of a batch of this shape."""
        width = at_least(self.lengths, min(length, self.lengths[-1]))
        return _computed(requests, self.batches) * width * _computed(candidates, self.candidates)

    def cut(self, batch: int, length: int, candidates: int) -> list[Piece]:
        """The pieces of a batch. Raises Permanent when the histories are too long."""
        if length > self.lengths[-1]:
            raise Permanent(f"histories of {length} tokens; this engine takes {self.lengths[-1]}: keep the newest")
        size = at_least(self.lengths, length)
        pieces = []
        for first, last in _runs(batch, self.batches[-1]):
            for start, end in _runs(candidates, self.candidates[-1]):
                bucket = Bucket(at_least(self.batches, last - first), size, at_least(self.candidates, end - start))
                pieces.append(Piece(first, last, start, end, bucket))
        return pieces


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending sizes that is not below `wanted`, which the last is not either."""
    return sizes[bisect_left(sizes, wanted)]


def _computed(total: int, sizes: Sequence[int]) -> int:
    """What is computed along one axis for `total`: full runs of the largest size, and a bucket for the rest."""
    whole, rest = divmod(total, sizes[-1])
    return whole * sizes[-1] + (at_least(sizes, rest) if rest else 0)


def _runs(total: int, most: int) -> list[tuple[int, int]]:
    return [(start, min(start + most, total)) for start in range(0, total, most)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the inputs of one bucket lie in one buffer, so that one copy brings them to the GPU. In float32 numbers."""

    bucket: Bucket
    token_dim: int
    user_dim: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs, in the order in which they lie."""
        b = self.bucket
        return {
            "hist": (b.batch, b.length, self.token_dim),
            "target": (b.batch, b.candidates, self.token_dim),
            "mask": (b.batch, b.length),
            "user": (b.batch, self.user_dim),
        }

    def offsets(self) -> dict[str, int]:
        """Where each input begins; `end` is behind the last."""
        found, at = {}, 0
        for name, shape in self.shapes().items():
            found[name] = at
            at += -(-int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
        return {**found, "end": at}

    @property
    def numbers(self) -> int:
        """Length of the buffer."""
        return self.offsets()["end"]

    @property
    def scores(self) -> int:
        """Length of the output."""
        return self.bucket.batch * self.bucket.candidates

    def views(self, buffer: F32) -> Features:
        """The inputs as views into a buffer of at least `numbers`."""
        offsets = self.offsets()
        arrays = {
            name: buffer[offsets[name] : offsets[name] + int(np.prod(shape))].reshape(shape)
            for name, shape in self.shapes().items()
        }
        return Features(arrays["hist"], arrays["target"], arrays["mask"], arrays["user"])


def fill(into: Features, part: Features) -> None:
    """Copy a part of a batch into a bucket's inputs. Padding of its own requests is zeroed, because what stands there
    from an earlier batch could be NaN; rows of no request are left: their scores are not read."""
    n, length = part.mask.shape
    candidates = part.target.shape[1]
    into.hist[:n, :length] = part.hist
    into.hist[:n, length:] = 0.0
    into.mask[:n, :length] = part.mask
    into.mask[:n, length:] = 0.0
    into.target[:n, :candidates] = part.target
    into.target[:n, candidates:] = 0.0
    into.user[:n] = part.user
