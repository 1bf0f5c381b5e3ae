"""Many requests as one padded batch, and its scores as many again. Pure.

Invariant: a request gets the same scores in a batch as alone (to float rounding), because padded history tokens are
masked, real ones keep their positions, and candidates do not see each other. Requests of like shapes are grouped, so
that at most `MAX_WASTE` of a batch is padding, and a batch never holds more than `max_rows` candidates unless a single
request does. Of a longer history the newest `MAX_HISTORY` tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def group(shapes: Sequence[tuple[int, int]], max_rows: int) -> list[list[int]]:
    """Indices of requests that run together, given (history length, candidates) of each; each index once."""
    if len(shapes) == 1:
        return [[0]]
    groups: list[list[int]] = []
    real = longest = most = 0
    for index in sorted(range(len(shapes)), key=lambda i: (int(_SIZES_PER_E * math.log1p(shapes[i][1])), shapes[i])):
        length, n = shapes[index]
        cells, rows = length * n, len(groups[-1]) + 1 if groups else 1
        wide, high = max(longest, length), max(most, n)
        if groups and rows * high <= max_rows and real + cells >= (1 - MAX_WASTE) * rows * wide * high:
            groups[-1].append(index)
            real, longest, most = real + cells, wide, high
        else:
            groups.append([index])
            real, longest, most = cells, length, n
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
