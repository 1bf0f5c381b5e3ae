"""One ranking tier as the gateway sees it: inputs in, logits out, within a deadline.

A call whose replica died during it goes to another live one, once; the wire itself never repeats a call. Refuses a
reply that is not one finite number per candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_service.schema import ModelInputs
from infra.deadline import Deadline
from infra.errors import PeerGone, RemoteFailure
from infra.wire.client import PeerState
from infra.wire.messages import Reply
from reranker.gateway.degrade import usable
from reranker.gateway.metrics import RETRIES

F32 = NDArray[np.float32]


class Caller(Protocol):
    """What this module needs of `infra.wire.client.WireClient`."""

    async def call(
        self,
        method: str,
        *,
        args: Mapping[str, Any] | None = None,
        tensors: Mapping[str, NDArray[Any]] | None = None,
        release: str = "",
        deadline: Deadline,
        trace_id: str = "",
        peer: str | None = None,
    ) -> Reply: ...

    def peers(self) -> Sequence[PeerState]: ...


class Scored(NamedTuple):
    """Logits f32[N], and the engine that gave them (`kind:precision`)."""

    logits: F32
    engine: str


class Ranker:
    """Calls one tier: `edge` or `rerank`."""

    def __init__(self, wire: Caller, stage: Literal["edge", "rerank"]) -> None:
        self._wire = wire
        self._stage = stage

    async def score(self, inputs: ModelInputs, *, release: str, deadline: Deadline, trace_id: str) -> Scored:
        """Logits of the candidates. Raises a TrirankError when there are none in time."""
        n = inputs.target.shape[0]
        tensors = {"hist": inputs.hist, "target": inputs.target, "mask": inputs.mask, "user": inputs.user}
        try:
            reply = await self._wire.call(
                "rank", tensors=tensors, release=release, deadline=deadline, trace_id=trace_id
            )
        except PeerGone:
            if not self._another_lives(release):
                raise
            RETRIES.labels(self._stage).inc()
            reply = await self._wire.call(
                "rank", tensors=tensors, release=release, deadline=deadline, trace_id=trace_id
            )
        scores = reply.tensors.get("scores")
        if scores is None or not usable(scores, n):
            raise RemoteFailure(f"{self._stage}: the reply is not {n} finite scores")
        return Scored(scores, reply.args.get("engine", ""))

    def _another_lives(self, release: str) -> bool:
        return any(peer.live and peer.release == release for peer in self._wire.peers())
