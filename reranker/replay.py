"""Events of a log as the model inputs that serving would have assembled for them, many at a time.

Refuses nothing. Invariant: requests of one batch have histories of the same length, so nothing is padded; an empty
history is one masked token of zeros, as in serving.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from edge_ranker.samples import make_batch
from feature_service.timeline import Timeline
from infra.engine.batch import Features
from reranker.rankers import Rankers

I64 = NDArray[np.int64]

# Requests of one batch; with a few hundred candidates each they fit the caches.
CHUNK = 16


@torch.no_grad()
def replay(
    rankers: Rankers, timeline: Timeline, events: I64, candidates: I64, chunk: int = CHUNK
) -> Iterator[tuple[I64, Features]]:
    """Batches of the requests before `events` i64[R] with item numbers `candidates` i64[R, N]: which rows of `events`
    they are, and the inputs."""
    schema, data = rankers.tables.schema, timeline.dataset
    lengths = timeline.histories(schema, events).mask.sum(axis=1).astype(np.int64)
    for length in np.unique(lengths).tolist():
        members = np.flatnonzero(lengths == length)
        for start in range(0, members.size, chunk):
            rows = members[start : start + chunk]
            without_row = ~rankers.tables.trained_users[data.user[events[rows]]]
            batch = make_batch(timeline, schema, events[rows], candidates[rows], without_row)
            encoded = rankers.encode(batch)
            # Real tokens stand at the end.
            kept = slice(-max(length, 1), None)
            mask = batch.mask[:, kept]
            hist = encoded.history.laid_out()[:, kept] * mask.unsqueeze(2)
            yield rows, Features(hist.numpy(), encoded.target.numpy(), mask.numpy(), encoded.user.numpy())
