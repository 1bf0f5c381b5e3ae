from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.engine.breaker import FIRST_PAUSE_S, MAX_FAILURES
from infra.engine.chain import EngineChain
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import NonFiniteScores
from infra.errors import Permanent
from tests.engines import TOKEN, USER, Clock, FormulaCheck, Fuse, batch, offer
from tests.onnx_models import write_ranker
from tests.support import eventually

FIRST, SECOND, LAST = "onnxruntime-cpu:int8", "onnxruntime-cpu:fp32", "torch-cpu:fp32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory.mktemp("m") / "r.onnx", TOKEN, USER, poison=True)


class Chain:
    """A chain of two light engines and a heavy one, each with its fuse, on a clock set by hand."""

    def __init__(self, model: Path) -> None:
        self.fuses = {name: Fuse() for name in (FIRST, SECOND, LAST)}
        self.clock = Clock()
        self._plain = OnnxEngine(model)
        offers = [offer(model, fuse, *name.split(":"), heavy=name == LAST) for name, fuse in self.fuses.items()]
        self.engines = EngineChain("edge", offers, FormulaCheck(model), measured=False, clock_s=self.clock)
        self.engines.start()

    def answers(self, seed: int = 0, n_requests: int = 1) -> str:
        """Run a batch; the scores are right, whoever gives them. Returns the name of who did."""
        inputs = batch(n_requests, seed=seed)
        np.testing.assert_allclose(self.engines.run(*inputs), self._plain.run(*inputs), atol=1e-5)
        return f"{self.engines.kind}:{self.engines.precision}"

    @property
    def ready(self) -> object:
        return self.engines.state()["engines_ready"]


@pytest.fixture
def chain(model: Path) -> Iterator[Chain]:
    made = Chain(model)
    yield made
    made.engines.close()


@pytest.mark.parametrize("failure", ["raises", "not_finite"])
def test_the_request_in_hand_is_answered_by_the_next_engine(chain: Chain, failure: str) -> None:
    assert chain.answers() == FIRST
    setattr(chain.fuses[FIRST], failure, RuntimeError("the device is gone") if failure == "raises" else True)

    assert chain.answers(1, n_requests=4) == SECOND
    assert chain.answers(2) == SECOND
    eventually(lambda: chain.fuses[FIRST].closed == 1)


def test_an_engine_that_is_sound_after_one_failure_serves_again(chain: Chain) -> None:
    chain.fuses[FIRST].raises = _Healing(chain.fuses[FIRST])

    assert chain.answers() == SECOND
    eventually(lambda: chain.ready == [FIRST, SECOND])
    assert chain.answers() == FIRST
    assert chain.fuses[FIRST].made == 1


class _Healing(Exception):
    """An error whose text, once asked for, heals the engine."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def __str__(self) -> str:
        self._fuse.raises = None
        return "once"


def test_an_engine_that_raises_too_often_is_out_though_it_scores_recorded_requests(chain: Chain) -> None:
    for _ in range(MAX_FAILURES):
        eventually(lambda: chain.ready == [FIRST, SECOND])
        chain.fuses[FIRST].raises = _Healing(chain.fuses[FIRST])
        assert chain.answers() == SECOND

    eventually(lambda: chain.fuses[FIRST].closed == 1)
    assert chain.ready == [SECOND]


def test_an_engine_that_is_out_comes_back_after_its_pause_when_it_scores_as_recorded(chain: Chain) -> None:
    fuse = chain.fuses[FIRST]
    fuse.not_finite = True
    chain.answers()
    eventually(lambda: fuse.closed == 1)
    fuse.not_finite = False
    runs = fuse.runs

    assert chain.answers() == SECOND
    assert fuse.runs == runs

    chain.clock.now_s += FIRST_PAUSE_S
    eventually(lambda: chain.ready == [FIRST, SECOND])
    assert chain.answers() == FIRST
    assert fuse.made == 2


def test_an_engine_that_still_fails_its_trial_never_meets_a_request(chain: Chain) -> None:
    fuse = chain.fuses[FIRST]
    fuse.raises = RuntimeError("for good")
    chain.answers()
    eventually(lambda: fuse.closed == 1)

    chain.clock.now_s += FIRST_PAUSE_S
    eventually(lambda: fuse.closed == 2)

    assert [chain.answers(seed) for seed in range(3)] == [SECOND] * 3
    assert chain.engines.state()["engines_refused"] == {FIRST: "failed: for good"}


def test_inputs_that_are_not_finite_fail_alone_and_blame_no_engine(chain: Chain) -> None:
    inputs = batch()
    inputs[1][0, 2, 1] = np.nan

    for _ in range(2 * MAX_FAILURES):
        with pytest.raises(NonFiniteScores):
            chain.engines.run(*inputs)

    assert chain.answers() == FIRST
    assert chain.fuses[SECOND].runs == 1  # the recorded requests at start


def test_a_request_no_engine_can_score_fails_alone_and_blames_no_engine(chain: Chain) -> None:
    poisoned = batch()
    poisoned[1][0, 2, 0] = 101.0

    for _ in range(2 * MAX_FAILURES):
        with pytest.raises(NonFiniteScores):
            chain.engines.run(*poisoned)

    assert chain.ready == [FIRST, SECOND]
    assert chain.answers() == FIRST
    assert chain.fuses[LAST].made == 0


def test_a_request_no_engine_can_score_does_not_hide_that_one_is_broken(chain: Chain) -> None:
    chain.fuses[FIRST].not_finite = True
    poisoned = batch()
    poisoned[1][0, 2, 0] = 101.0

    with pytest.raises(NonFiniteScores):
        chain.engines.run(*poisoned)

    eventually(lambda: chain.fuses[FIRST].closed == 1)
    assert chain.ready == [SECOND]


def test_when_all_that_stand_by_are_broken_the_next_is_opened_for_the_request_in_hand(chain: Chain) -> None:
    for name in (FIRST, SECOND):
        chain.fuses[name].not_finite = True

    assert chain.answers() == LAST
    assert chain.ready == [LAST]


def test_a_broken_engine_with_nothing_behind_it_is_opened_afresh(model: Path) -> None:
    fuse = Fuse()
    chain = EngineChain("edge", [offer(model, fuse, "onnxruntime-cpu")], FormulaCheck(model))
    chain.start()
    fuse.gone = 1

    scores = chain.run(*batch())

    np.testing.assert_allclose(scores, OnnxEngine(model).run(*batch()), atol=1e-5)
    assert (fuse.made, fuse.closed) == (2, 1)
    chain.close()


def test_a_run_that_does_not_end_can_be_told_by_how_long_it_lasts(chain: Chain) -> None:
    hangs = chain.fuses[FIRST].hangs = threading.Event()
    caller = threading.Thread(target=chain.answers)
    runs = chain.fuses[FIRST].runs
    assert chain.engines.running_s() == 0.0

    caller.start()
    eventually(lambda: chain.fuses[FIRST].runs > runs)
    chain.clock.now_s += 25.0

    assert chain.engines.running_s() == 25.0
    hangs.set()
    caller.join()
    assert chain.engines.running_s() == 0.0


def test_when_nothing_works_the_request_fails_and_the_replica_says_it_is_not_able(chain: Chain) -> None:
    for fuse in chain.fuses.values():
        fuse.raises = RuntimeError("all broken")

    with pytest.raises(Permanent, match="all broken"):
        chain.answers()
    assert not chain.engines.able
    with pytest.raises(Permanent, match="no engine is left"):
        chain.answers()

    for fuse in chain.fuses.values():
        fuse.raises = None
    chain.clock.now_s += FIRST_PAUSE_S
    eventually(lambda: chain.engines.able)
    assert chain.answers() in (FIRST, SECOND, LAST)
