from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from feature_service.schema import ModelInputs
from infra.deadline import Deadline
from infra.errors import DeadlineExceeded, PeerGone, RemoteFailure, TrirankError
from infra.wire.client import PeerState
from infra.wire.messages import Reply
from reranker.gateway.ranker import Ranker, Scored

INPUTS = ModelInputs(
    np.zeros((1, 4), np.float32), np.zeros((3, 4), np.float32), np.ones(1, np.float32), np.zeros(2, np.float32)
)
GOOD = Reply({"engine": "onnxruntime-cpu:fp32"}, {"scores": np.array([1, 2, 3], np.float32)})


class Wire:
    """Answers calls with what it is given, in turn."""

    def __init__(self, *answers: Reply | TrirankError, peers: tuple[tuple[bool, str], ...] = ((True, "r"),)) -> None:
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []
        self._peers = [PeerState(f"p{i}", "a", release, live, 0, {}) for i, (live, release) in enumerate(peers)]

    def peers(self) -> list[PeerState]:
        return self._peers

    async def call(self, method: str, **how: Any) -> Reply:
        self.calls.append({"method": method, **how})
        answer = self.answers.pop(0)
        if isinstance(answer, TrirankError):
            raise answer
        return answer


def scored(wire: Wire) -> Scored:
    deadline = Deadline.after(60.0)
    return asyncio.run(Ranker(wire, "rerank").score(INPUTS, release="r", deadline=deadline, trace_id="t"))


def score(wire: Wire) -> np.ndarray:
    return scored(wire).logits


def test_scores_come_from_one_call_with_the_release_and_the_four_tensors() -> None:
    wire = Wire(GOOD)

    assert score(wire).tolist() == [1, 2, 3]
    [call] = wire.calls
    assert (call["method"], call["release"], call["trace_id"]) == ("rank", "r", "t")
    assert set(call["tensors"]) == {"hist", "target", "mask", "user"}


def test_a_call_whose_replica_died_goes_to_another_one_within_the_same_deadline() -> None:
    wire = Wire(PeerGone("dead"), GOOD, peers=((False, "r"), (True, "r")))

    assert score(wire).tolist() == [1, 2, 3]
    assert len(wire.calls) == 2
    assert wire.calls[0]["deadline"] == wire.calls[1]["deadline"]


def test_it_is_called_again_only_once() -> None:
    wire = Wire(PeerGone("dead"), PeerGone("dead too"), GOOD)

    with pytest.raises(PeerGone):
        score(wire)
    assert len(wire.calls) == 2


@pytest.mark.parametrize("peers", [(), ((False, "r"),), ((True, "other"),)])
def test_without_another_live_replica_it_is_not_called_again(
    peers: tuple[tuple[bool, str], ...],
) -> None:
    wire = Wire(PeerGone("dead"), GOOD, peers=peers)

    with pytest.raises(PeerGone):
        score(wire)
    assert len(wire.calls) == 1


def test_a_late_call_is_not_repeated() -> None:
    wire = Wire(DeadlineExceeded("late"), GOOD)

    with pytest.raises(DeadlineExceeded):
        score(wire)
    assert len(wire.calls) == 1


@pytest.mark.parametrize("scores", [[1, 2], [1, 2, 3, 4], [1, np.nan, 3], [1, 2, np.inf], [[1, 2, 3]]])
def test_a_reply_that_is_not_one_finite_number_per_candidate_is_refused(scores: list[float]) -> None:
    with pytest.raises(RemoteFailure):
        score(Wire(Reply({}, {"scores": np.array(scores, np.float32)})))


def test_a_reply_without_scores_is_refused() -> None:
    with pytest.raises(RemoteFailure):
        score(Wire(Reply()))


def test_the_scores_come_with_the_engine_that_gave_them() -> None:
    assert scored(Wire(GOOD)).engine == "onnxruntime-cpu:fp32"
