from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra.engine.choose import Offer
from infra.engine.witness import MAX_DEATHS, WINDOW_S, Witness
from tests.engines import TOKEN, USER, Clock, Fuse, offer
from tests.onnx_models import write_ranker

CRASHING, SOUND = "aotinductor:fp32", "onnxruntime-cpu:fp32"


@pytest.fixture
def offers(tmp_path: Path) -> list[Offer]:
    model = write_ranker(tmp_path / "r.onnx", TOKEN, USER)
    return [offer(model, Fuse(), *name.split(":")) for name in (CRASHING, SOUND)]


def dead_process() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def dies(folder: Path, offers: list[Offer], name: str, clock: Clock) -> None:
    """A process serves with an engine and dies without a word; the next one finds out."""
    Witness(folder, "edge", pid=dead_process(), now_s=clock).note(name)
    Witness(folder, "edge", now_s=clock).order(offers)


def order(folder: Path, offers: list[Offer], clock: Clock, role: str = "edge") -> list[str]:
    return [one.name for one in Witness(folder, role, now_s=clock).order(offers)]


def test_an_engine_under_which_processes_keep_dying_is_tried_last_for_a_while(
    tmp_path: Path, offers: list[Offer]
) -> None:
    clock = Clock()
    for _ in range(MAX_DEATHS - 1):
        dies(tmp_path, offers, CRASHING, clock)
        clock.now_s += 1
    assert order(tmp_path, offers, clock) == [CRASHING, SOUND]

    dies(tmp_path, offers, CRASHING, clock)

    assert order(tmp_path, offers, clock) == [SOUND, CRASHING]
    assert order(tmp_path, offers, clock, role="rerank") == [CRASHING, SOUND]
    clock.now_s += WINDOW_S + 1
    assert order(tmp_path, offers, clock) == [CRASHING, SOUND]


def test_the_only_engine_is_tried_whatever_happened(tmp_path: Path, offers: list[Offer]) -> None:
    clock = Clock()
    for _ in range(2 * MAX_DEATHS):
        dies(tmp_path, offers, SOUND, clock)
        clock.now_s += 1

    assert order(tmp_path, offers[1:], clock) == [SOUND]


def test_processes_that_end_in_order_or_still_run_blame_nobody(tmp_path: Path, offers: list[Offer]) -> None:
    clock = Clock()
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for _ in range(MAX_DEATHS):
        Witness(tmp_path, "edge", pid=running.pid, now_s=clock).note(CRASHING)
        ended = Witness(tmp_path, "edge", pid=dead_process(), now_s=clock)
        ended.note(CRASHING)
        ended.forget()

    assert order(tmp_path, offers, clock) == [CRASHING, SOUND]
    running.communicate(b"\n")


def test_a_process_is_blamed_on_the_engine_it_was_opening(tmp_path: Path, offers: list[Offer]) -> None:
    clock = Clock()
    for _ in range(MAX_DEATHS):
        witness = Witness(tmp_path, "edge", pid=dead_process(), now_s=clock)
        witness.note(SOUND)
        witness.order(offers)[0].make()
        order(tmp_path, offers, clock)
        clock.now_s += 1

    assert order(tmp_path, offers, clock) == [SOUND, CRASHING]
