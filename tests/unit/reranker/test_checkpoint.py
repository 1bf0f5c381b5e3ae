"""A checkpoint is whole or not there, belongs to one training, and is written by one process at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.clock import SystemClock
from infra.errors import ReleaseRefused
from reranker.checkpoint import Checkpoints, Draft

IDENTITY = {"data": "a", "seed": 7, "recipe": {"batch_size": 128, "amp": "off"}}


class HandClock(SystemClock):
    """A clock that goes when it is told to."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


def _checkpoints(draft: Path, identity: dict[str, Any] = IDENTITY, seed: int = 0, **more: Any) -> Checkpoints:
    return Checkpoints(
        draft, identity, np.random.default_rng(seed), **{"every_s": 60.0, "clock": SystemClock(), **more}
    )


def _written(draft: Path) -> None:
    draft.mkdir(exist_ok=True)
    checkpoints = _checkpoints(draft)
    checkpoints.open(resume=False)
    checkpoints.save({"rankers": {"w": torch.arange(3.0)}})


def test_what_was_saved_comes_back_with_both_generators(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    rng = np.random.default_rng(1)
    first = Checkpoints(tmp_path / "d", IDENTITY, rng, every_s=60.0, clock=SystemClock())
    assert not first.open(resume=True)
    assert first.load() is None
    first.save({"rankers": {"w": torch.arange(3.0)}, "best": None, "score": float("nan")})
    expected = torch.rand(4), rng.random(4)
    torch.rand(10)
    rng = np.random.default_rng(99)
    second = Checkpoints(tmp_path / "d", IDENTITY, rng, every_s=60.0, clock=SystemClock())
    assert second.open(resume=True)
    state = second.load()
    assert state is not None
    assert state["rankers"]["w"].tolist() == [0, 1, 2]
    assert state["best"] is None
    assert torch.equal(torch.rand(4), expected[0])
    assert (rng.random(4) == expected[1]).all()


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        ({**IDENTITY, "data": "b"}, "data was 'a', is 'b'"),
        ({**IDENTITY, "seed": 8}, "seed was 7, is 8"),
        ({**IDENTITY, "recipe": {"batch_size": 64, "amp": "off"}}, "recipe.batch_size was 128, is 64"),
        ({**IDENTITY, "recipe": {"batch_size": 128}}, "recipe.amp was 'off', is None"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_with_the_difference(
    tmp_path: Path, identity: dict[str, Any], difference: str
) -> None:
    _written(tmp_path)
    other = _checkpoints(tmp_path, identity)
    other.open(resume=True)
    with pytest.raises(ReleaseRefused) as refused:
        other.load()
    assert difference in str(refused.value)
    assert "without --resume" in str(refused.value)


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "flipped"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    _written(tmp_path)
    file = tmp_path / "checkpoint.pt"
    whole = file.read_bytes()
    at = whole.index(np.arange(3, dtype=np.float32).tobytes())
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    file.write_bytes({"empty": b"", "cut": whole[:100], "other": b"something else", "flipped": flipped}[damage])
    damaged = _checkpoints(tmp_path)
    damaged.open(resume=True)
    with pytest.raises(ReleaseRefused, match="cannot be read"):
        damaged.load()


def test_a_failed_write_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path)
    checkpoints = _checkpoints(tmp_path)
    checkpoints.open(resume=True)

    def full_disk(whole: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save({"rankers": {}})
    state = checkpoints.load()
    assert state is not None
    assert state["rankers"]["w"].tolist() == [0, 1, 2]


def test_two_processes_cannot_train_the_same_release(tmp_path: Path) -> None:
    with Draft(tmp_path / "r"):
        with pytest.raises(ReleaseRefused, match="another process is training"):
            Draft(tmp_path / "r").__enter__()
    with Draft(tmp_path / "r"):
        pass


def test_a_draft_is_kept_for_its_checkpoint_alone(tmp_path: Path) -> None:
    with Draft(tmp_path / "r") as draft:
        (draft.path / "spill").mkdir()
    assert not draft.path.exists()
    with Draft(tmp_path / "r") as draft:
        (draft.path / "checkpoint.pt").write_bytes(b"c")
    with Draft(tmp_path / "r") as draft:
        assert (draft.path / "checkpoint.pt").read_bytes() == b"c"
        draft.discard()
    assert not draft.path.exists()


def test_without_resume_an_old_checkpoint_is_discarded_and_reported(tmp_path: Path) -> None:
    _written(tmp_path)
    fresh = _checkpoints(tmp_path)
    assert fresh.open(resume=False)
    assert fresh.load() is None
    assert not (tmp_path / "checkpoint.pt").exists()


def test_it_is_time_for_the_next_one_after_so_many_seconds(tmp_path: Path) -> None:
    clock = HandClock()
    checkpoints = _checkpoints(tmp_path, clock=clock, every_s=10.0)
    checkpoints.open(resume=False)
    clock.now_s = 9.9
    assert not checkpoints.due()
    clock.now_s = 10.0
    assert checkpoints.due()
    checkpoints.save({})
    assert not checkpoints.due()


def test_the_draft_lies_hidden_beside_the_release() -> None:
    assert Draft(Path("/data/releases/monday")).path == Path("/data/releases/.monday.draft")
