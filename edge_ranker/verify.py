"""How a replica puts an engine to the test before it serves: the recorded requests, and the shapes that serving has.

Goes through the same handler as requests do, in batches. Refuses an engine at the first difference that matters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edge_ranker.recorded import RecordedInputs
from feature_service.schema import FeatureSchema
from infra.engine.agree import disagreement
from infra.engine.choose import EngineDisagrees
from infra.engine.rank import RankHandler
from infra.engine.run import Engine, NonFiniteScores
from infra.release import Role
from infra.wire.messages import Reply, Request

F32 = NDArray[np.float32]

# Candidate counts: the two tiers' usual ones, and the ends.
WARM_SIZES = (1, 20, 100, 200, 500)
USUAL_SIZE: dict[Role, int] = {"edge": 500, "rerank": 100}
# Recorded requests that tell whether an engine which served well until now is broken.
QUICK = 4


class RecordedCheck:
    """Tests engines of one role of one release."""

    def __init__(self, role: Role, schema: FeatureSchema, recorded: Sequence[RecordedInputs]) -> None:
        self._role = role
        self._schema = schema
        self._requests = [_request(r.inputs.hist, r.inputs.target, r.inputs.mask, r.inputs.user) for r in recorded]
        self._logits = [r.edge_logits if role == "edge" else r.rerank_logits for r in recorded]

    def whole(self, engine: Engine) -> None:
        """Score every recorded request as it would come over the wire, then run the shapes that requests have, so
        that the first ones do not pay for allocations. Raises EngineDisagrees."""
        self._compare(engine, len(self._requests))
        self._warm_up(engine)

    def quick(self, engine: Engine) -> None:
        """Score a few recorded requests. Raises EngineDisagrees."""
        self._compare(engine, QUICK)

    def seconds(self, engine: Engine) -> float:
        """Time on a core of one request of the tier's usual size, the best of eight. For engines of the CPU."""
        handler, request = self._handler(engine), self._request_of(self._schema.max_history, USUAL_SIZE[self._role])
        return min(_seconds(handler, request) for _ in range(8))

    def _compare(self, engine: Engine, count: int) -> None:
        answers = self._handler(engine).handle(self._requests[:count])
        served = []
        for answer in answers:
            if not isinstance(answer, Reply):
                raise EngineDisagrees(f"{self._role}: a recorded request cannot be scored: {answer}")
            served.append(answer.tensors["scores"])
        if served and (difference := disagreement(self._logits[:count], served, engine.precision)):
            raise EngineDisagrees(f"{self._role}: {difference}")

    def _warm_up(self, engine: Engine) -> None:
        """Every shape of `WARM_SIZES`, with the longest history and with none, alone and as many as one batch holds."""
        handler, likes = self._handler(engine), engine.batching
        for length, n in product((1, self._schema.max_history), WARM_SIZES):
            request = self._request_of(length, n)
            for count in (1, max(1, min(likes.requests, likes.rows // n))):
                for answer in handler.handle([request] * count):
                    # What a model makes of zeros is its own affair; that it can be run for this shape is ours.
                    if not isinstance(answer, Reply | NonFiniteScores):
                        raise EngineDisagrees(f"{self._role}: {count} x {length} x {n} cannot be run: {answer}")

    def _request_of(self, length: int, n: int) -> Request:
        schema = self._schema
        hist, target = np.zeros((length, schema.token_dim), np.float32), np.zeros((n, schema.token_dim), np.float32)
        return _request(hist, target, np.ones(length, np.float32), np.zeros(schema.user_dim, np.float32))

    def _handler(self, engine: Engine) -> RankHandler:
        return RankHandler(engine, "", token_dim=self._schema.token_dim, user_dim=self._schema.user_dim)


def _seconds(handler: RankHandler, request: Request) -> float:
    """On a core: what else the machine does while a replica starts must not choose its engine."""
    began_s = time.thread_time()
    handler.handle([request])
    return time.thread_time() - began_s


def _request(hist: F32, target: F32, mask: F32, user: F32) -> Request:
    return Request("rank", tensors={"hist": hist, "target": target, "mask": mask, "user": user})
