"""Held-out requests of a training as one small file, so that a machine without the data and the trainer can score them.

Each distinct row is kept once: the 300 tokens of a request are rows of few items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Features
from infra.engine.quality import Scored
from reranker.precisions import Rules, compared_requests
from reranker.replay import replay

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class HeldOut:
    """`items` i64[R, 1 + n per kind]: candidates, the taken one first; batches of requests of one length."""

    items: I64
    kinds: list[str]
    batches: list[tuple[I64, Features]]

    def scored(self, logits: F32) -> Scored:
        """Logits f32[R, N] of all requests, as `infra.engine.quality` compares them."""
        bounds = np.linspace(1, self.items.shape[1], len(self.kinds) + 1).astype(int)
        negatives = {kind: logits[:, bounds[i] : bounds[i + 1]] for i, kind in enumerate(self.kinds)}
        return Scored(logits[:, 0], negatives, self.items)


def write_requests(path: Path, rankers: Any, timeline: Any, trial: Any) -> None:
    """The requests that the quality gate compares precisions on."""
    events, negatives, candidates = compared_requests(timeline, trial, Rules().compared_requests)
    arrays: dict[str, Any] = {"items": candidates, "kinds": np.array(list(negatives))}
    batches = list(replay(rankers, timeline, events, candidates))
    tokens = [part for _, f in batches for part in (f.hist, f.target)]
    rows, places = np.unique(np.concatenate([t.reshape(-1, t.shape[2]) for t in tokens]), axis=0, return_inverse=True)
    arrays["rows"], at = rows, 0
    for number, (which, f) in enumerate(batches):
        arrays |= {f"{number}.which": which, f"{number}.mask": f.mask, f"{number}.user": f.user}
        for name, part in (("hist", f.hist), ("target", f.target)):
            size = part.shape[0] * part.shape[1]
            arrays[f"{number}.{name}"] = places.ravel()[at : at + size].reshape(part.shape[:2]).astype(np.int32)
            at += size
    np.savez_compressed(path, **arrays)


def read_requests(path: Path) -> HeldOut:
    """What `write_requests` wrote."""
    with np.load(path) as kept:
        arrays = dict(kept)
    return HeldOut(arrays["items"], arrays["kinds"].tolist(), list(_batches(arrays)))


def _batches(arrays: dict[str, Any]) -> Iterator[tuple[I64, Features]]:
    rows, number = arrays["rows"], 0
    while f"{number}.which" in arrays:
        hist, target, mask, user = (arrays[f"{number}.{name}"] for name in ("hist", "target", "mask", "user"))
        yield arrays[f"{number}.which"], Features(rows[hist], rows[target], mask, user)
        number += 1
