"""The handler behind a replica's socket: many `rank` requests at once, in as few runs of the engine as pays.

Refuses requests of another method or release, and tensors that are no request, one by one: the others of the batch
are answered. Invariant: one request that cannot be scored fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Batching, Features, Limited, check_features, group, newest, pad, unpad
from infra.engine.metrics import cells
from infra.engine.names import engine_name
from infra.errors import InvalidInput, Permanent, TrirankError
from infra.wire.messages import Reply, Request

F32 = NDArray[np.float32]
METHOD = "rank"


class Runner(Protocol):
    """The part of an engine that answers requests; `kind` and `precision` are those of the last answer."""

    @property
    def kind(self) -> str: ...

    @property
    def precision(self) -> str: ...

    @property
    def batching(self) -> Batching:
        """Which batches it likes now."""

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """See `infra.engine.run.Engine`."""


class RankHandler:
    """Answers `rank` requests of one release with one engine; `role` is whose metrics count them, "" counts nothing.
    `max_requests` and `max_rows` limit a batch, where they are not 0, in place of what the engine likes."""

    def __init__(
        self,
        engine: Runner,
        release: str,
        *,
        token_dim: int,
        user_dim: int,
        max_requests: int = 0,
        max_rows: int = 0,
        role: str = "",
    ) -> None:
        self._engine = engine
        self._release = release
        self._token_dim = token_dim
        self._user_dim = user_dim
        self._max_requests = max_requests
        self._max_rows = max_rows
        self._role = role

    def max_batch(self) -> int:
        """Requests to hand over at once: as the engine in use likes, or the setting. Another engine, another number."""
        return self._batching().requests

    def handle(self, requests: Sequence[Request]) -> Sequence[Reply | TrirankError]:
        """One reply or error per request, in their order: args {"engine": name of the engine that scored it}, tensors
        {"scores": f32[N]} (logits)."""
        answers: list[Reply | TrirankError] = [Permanent("not answered")] * len(requests)
        good: list[int] = []
        parsed: list[Features] = []
        for i, request in enumerate(requests):
            try:
                parsed.append(self._parse(request))
                good.append(i)
            except TrirankError as error:
                answers[i] = error
        shapes = [(features.hist.shape[0], features.target.shape[0]) for features in parsed]
        batching = self._batching()
        for members in group(shapes, batching):
            for member, answer in zip(members, self._run([parsed[m] for m in members], batching), strict=True):
                answers[good[member]] = answer
        return answers

    def _parse(self, request: Request) -> Features:
        if request.method != METHOD:
            raise InvalidInput("method", f"{request.method!r} is not {METHOD!r}")
        if request.release not in ("", self._release):
            raise Permanent(f"release {request.release!r} is asked for, this replica serves {self._release!r}")
        tensors = request.tensors
        if missing := {"hist", "target", "mask", "user"} - tensors.keys():
            raise InvalidInput(sorted(missing)[0], "is missing")
        features = Features(tensors["hist"], tensors["target"], tensors["mask"], tensors["user"])
        return newest(check_features(features, self._token_dim, self._user_dim))

    def _batching(self) -> Batching:
        likes = self._engine.batching
        if not (self._max_requests or self._max_rows):
            return likes
        return Limited(likes, self._max_requests or likes.requests, self._max_rows or likes.rows)

    def _run(self, requests: Sequence[Features], batching: Batching) -> list[Reply | TrirankError]:
        batch = pad(requests)
        if batch.target.shape[1] == 0:
            return [Reply({"engine": self._name()}, {"scores": np.empty(0, np.float32)}) for _ in requests]
        try:
            scores = self._engine.run(batch.hist, batch.target, batch.mask, batch.user)
        except TrirankError as error:
            return [error] if len(requests) == 1 else [a for r in requests for a in self._run([r], batching)]
        if self._role:
            self._count(requests, batch, batching)
        args = {"engine": self._name()}
        return [Reply(args, {"scores": s}) for s in unpad(scores, [r.target.shape[0] for r in requests])]

    def _name(self) -> str:
        return engine_name(self._engine.kind, self._engine.precision)

    def _count(self, requests: Sequence[Features], batch: Features, batching: Batching) -> None:
        real = sum(r.hist.shape[0] * r.target.shape[0] for r in requests)
        cells(self._role, "real").inc(real)
        n_batch, longest = batch.mask.shape
        cells(self._role, "padding").inc(batching.cells(n_batch, longest, batch.target.shape[1]) - real)
