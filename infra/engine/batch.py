"""Many requests as one padded batch, and its scores as many again. Pure.

Invariant: a request gets the same scores in a batch as alone (to float rounding), because padded history tokens are
masked, real ones keep their positions, and candidates do not see each other. How large a batch may be is the engine's
to say (`Batching`). Requests of like shapes are grouped: no batch holds more of them or more candidates than that,
unless a single request does; at most `MAX_WASTE` of what is computed for them is padding, unless it is as much for
each of them alone. Of a longer history the newest `MAX_HISTORY` tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.errors import InvalidInput

F32 = NDArray[np.float32]

# Share of a batch's cells (history tokens x candidates) that may be padding; above this a second batch is cheaper.
MAX_WASTE = 0.25
# Engines are built for histories up to this.
MAX_HISTORY = 100
# Candidate counts within about 15 % of each other are of one size.
_SIZES_PER_E = 7.0


class Batching(Protocol):
    """Which batches an engine likes, and what it computes for one."""

    @property
    def requests(self) -> int:
        """Most requests in one batch."""

    @property
    def rows(self) -> int:
        """Most candidates in one batch, those of all requests together."""

    def size(self, candidates: int) -> int:
        """The class of a candidate count, ascending; counts of one class pad each other little."""

    def cells(self, requests: int, length: int, candidates: int) -> int:
        """Cells (history tokens x candidates) computed for a batch of this shape, padding included."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Of an engine that computes any shape as it is: a batch is as large as its largest request. The limits are a
    CPU's: replies of a batch leave together, and a larger one runs no faster per request, it only holds them back."""

    requests: int = 8
    rows: int = 1024

    def size(self, candidates: int) -> int:
        """See `Batching.size`."""
        return int(_SIZES_PER_E * math.log1p(candidates))

    def cells(self, requests: int, length: int, candidates: int) -> int:
        """See `Batching.cells`."""
        return requests * length * candidates


@dataclass(frozen=True, slots=True)
class Limited:
    """Another one with limits of the operator's."""

    of: Batching
    requests: int
    rows: int

    def size(self, candidates: int) -> int:
        """See `Batching.size`."""
        return self.of.size(candidates)

    def cells(self, requests: int, length: int, candidates: int) -> int:
        """See `Batching.cells`."""
        return self.of.cells(requests, length, candidates)


@dataclass(frozen=True, slots=True)
class Features:
    """Model inputs of one request: hist f32[L, T], target f32[N, T], mask f32[L], user f32[U]; or of a batch, with
    one more leading dimension each."""

    hist: F32
    target: F32
    mask: F32
    user: F32


def check_features(features: Features, token_dim: int, user_dim: int) -> Features:
    """The same features. Raises InvalidInput when they are not one request of these widths."""
    wanted = (
        ("hist", features.hist, (None, token_dim)),
        ("target", features.target, (None, token_dim)),
        ("mask", features.mask, (features.hist.shape[0] if features.hist.ndim else None,)),
        ("user", features.user, (user_dim,)),
    )
    for name, array, shape in wanted:
        fits = array.ndim == len(shape) and all(w in (None, n) for n, w in zip(array.shape, shape, strict=True))
        if array.dtype != np.float32 or not fits:
            raise InvalidInput(name, f"must be f32 {shape}, not {array.dtype} {array.shape}")
    if features.hist.shape[0] == 0:
        raise InvalidInput("hist", "has no token; an empty history is one masked token")
    return features


def newest(features: Features) -> Features:
    """The same request with at most `MAX_HISTORY` history tokens: the newest real ones, which come last."""
    if features.hist.shape[0] <= MAX_HISTORY:
        return features
    kept = np.flatnonzero(features.mask)[-MAX_HISTORY:]
    if kept.size == 0:
        return Features(features.hist[:1], features.target, features.mask[:1], features.user)
    return Features(features.hist[kept], features.target, features.mask[kept], features.user)


def group(shapes: Sequence[tuple[int, int]], batching: Batching) -> list[list[int]]:
    """Indices of requests that run together, given (history length, candidates) of each; each index once."""
    if len(shapes) == 1:
        return [[0]]
    groups: list[list[int]] = []
    real = each = longest = most = 0
    for index in sorted(range(len(shapes)), key=lambda i: (batching.size(shapes[i][1]), shapes[i])):
        length, n = shapes[index]
        rows, wide, high = len(groups[-1]) + 1 if groups else 1, max(longest, length), max(most, n)
        alone, widened = batching.cells(1, length, n), batching.cells(1, wide, high)
        fits = rows <= batching.requests and rows * high <= batching.rows
        if groups and fits and (real + length * n >= (1 - MAX_WASTE) * rows * widened or alone == each == widened):
            groups[-1].append(index)
            real, each, longest, most = real + length * n, widened, wide, high
        else:
            groups.append([index])
            real, each, longest, most = length * n, alone, length, n
    return groups


def pad(requests: Sequence[Features]) -> Features:
    """One batch [B, ...] of requests [...]: histories and candidates are filled up at the end, with mask 0."""
    if len(requests) == 1:
        only = requests[0]
        return Features(only.hist[None], only.target[None], only.mask[None], only.user[None])
    n_batch, width = len(requests), requests[0].target.shape[1]
    longest = max(r.hist.shape[0] for r in requests)
    most = max(r.target.shape[0] for r in requests)
    hist = np.zeros((n_batch, longest, width), np.float32)
    target = np.zeros((n_batch, most, width), np.float32)
    mask = np.zeros((n_batch, longest), np.float32)
    for i, request in enumerate(requests):
        hist[i, : request.hist.shape[0]] = request.hist
        target[i, : request.target.shape[0]] = request.target
        mask[i, : request.mask.shape[0]] = request.mask
    return Features(hist, target, mask, np.stack([r.user for r in requests]))


def unpad(scores: F32, sizes: Sequence[int]) -> list[F32]:
    """Scores f32[n_i] of each request out of f32[B, N]."""
    return [np.ascontiguousarray(scores[i, :size]) for i, size in enumerate(sizes)]
