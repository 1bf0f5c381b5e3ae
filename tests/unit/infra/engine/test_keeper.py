"""The thread that looks after engines goes on whatever happens to it, and says so in a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from infra.engine.keeper import Keeper
from tests.engines import TOKEN, USER, FormulaCheck
from tests.onnx_models import write_ranker
from tests.support import eventually


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory.mktemp("m") / "r.onnx", TOKEN, USER, poison=True)


class FirstFails:
    """A clock that fails when it is first asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        if self.asked == 1:
            raise ValueError("a bug")
        return 0.0


def faults() -> float:
    return REGISTRY.get_sample_value("engine_keeper_faults_total", {"role": "rerank"}) or 0.0


def test_a_look_that_fails_by_itself_is_counted_and_followed_by_another(model: Path) -> None:
    clock, before = FirstFails(), faults()
    keeper = Keeper("rerank", [], FormulaCheck(model), clock)
    keeper.start()
    assert keeper.replace([]) is None
    eventually(lambda: clock.asked > 1)
    assert faults() == before + 1
    keeper.stop()
