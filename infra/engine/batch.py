"""Many requests as one padded batch, and its scores as many again. Pure.

Invariant: a request gets the same scores in a batch as alone (to float rounding), because padded history tokens are
masked, real ones keep their positions, and candidates do not see each other. Requests are grouped by size, so that
padding costs little, and a batch never holds more than `max_rows` candidates unless a single request does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.errors import InvalidInput

F32 = NDArray[np.float32]

# Padded candidates over real ones; above this a second batch is cheaper.
MAX_WASTE = 1.25


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


def group(sizes: Sequence[int], max_rows: int) -> list[list[int]]:
    """Indices of requests that run together, given their candidate counts; small ones first, each index once."""
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        size = sizes[index]
        current = groups[-1] if groups else []
        padded = size * (len(current) + 1)
        if not current or padded > max_rows or padded > MAX_WASTE * (real + size):
            groups.append([index])
            real = size
        else:
            current.append(index)
            real += size
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
