"""What a replica does before it serves: score the recorded requests as the trained models did, and warm up.

Goes through the same handler as requests do, in batches. Refuses a release at the first difference that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_ranker.recorded import RecordedInputs
from feature_service.schema import FeatureSchema
from infra.engine.rank import MAX_ROWS, RankHandler
from infra.errors import ReleaseRefused
from infra.wire.messages import Reply, Request

F32 = NDArray[np.float32]
Role = Literal["edge", "rerank"]

# Largest difference of a logit from the recorded one.
TOLERANCE = 1e-3
WARM_SIZES = (1, 20, 100, 500)


def verify(handler: RankHandler, recorded: Sequence[RecordedInputs], role: Role) -> None:
    """Score the recorded requests as they would come over the wire. Raises ReleaseRefused at a difference."""
    answers = handler.handle([_request(r.inputs.hist, r.inputs.target, r.inputs.mask, r.inputs.user) for r in recorded])
    worst = 0.0
    for one, answer in zip(recorded, answers, strict=True):
        if not isinstance(answer, Reply):
            raise ReleaseRefused(f"{role}: a recorded request cannot be scored: {answer}")
        expected = one.edge_logits if role == "edge" else one.rerank_logits
        worst = max(worst, float(np.abs(answer.tensors["scores"] - expected).max(initial=0.0)))
    if worst > TOLERANCE:
        raise ReleaseRefused(
            f"{role}: scores differ from the recorded ones by up to {worst:.2g}, more than {TOLERANCE}"
        )


def warm_up(handler: RankHandler, schema: FeatureSchema) -> None:
    """Run the shapes that requests have, so that the first ones do not pay for allocations."""
    length, token, user = schema.max_history, schema.token_dim, np.zeros(schema.user_dim, np.float32)
    hist, mask = np.zeros((length, token), np.float32), np.ones(length, np.float32)
    for n in WARM_SIZES:
        handler.handle([_request(hist, np.zeros((n, token), np.float32), mask, user)])
    many = MAX_ROWS // WARM_SIZES[-1]
    handler.handle([_request(hist, np.zeros((WARM_SIZES[-1], token), np.float32), mask, user)] * many)


def _request(hist: F32, target: F32, mask: F32, user: F32) -> Request:
    return Request("rank", tensors={"hist": hist, "target": target, "mask": mask, "user": user})
