"""Graph capture by the driver: the order of its calls, and that a failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from infra.engine.tensorrt.capture import SIGNATURES, Capture
from infra.errors import Permanent

GRAPH, EXECUTABLE, STREAM = 7, 9, 3


class FakeLibrary(SimpleNamespace):
    """libcuda's functions; `calls` are their names, and the call named `failing` returns error 700."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        super().__init__(**{name: self._function(name, failing) for name in SIGNATURES})

    def _function(self, name: str, failing: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            assert len(arguments) == len(call.argtypes)  # type: ignore[attr-defined]
            self.calls.append(name)
            written = {"cuStreamEndCapture": (1, GRAPH), "cuGraphInstantiateWithFlags": (0, EXECUTABLE)}
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"an illegal memory access was encountered"
            elif name in written:
                at, value = written[name]
                arguments[at]._obj.value = value
            return 700 if name == failing else 0

        return call


def test_work_is_captured_made_executable_and_its_graph_dropped() -> None:
    library = FakeLibrary()
    capture = Capture(library)
    assert capture.record(STREAM, lambda: library.calls.append("work")) == EXECUTABLE
    assert library.calls == [
        "cuStreamBeginCapture_v2",
        "work",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
    ]
    capture.launch(EXECUTABLE, STREAM)
    capture.drop(EXECUTABLE)
    assert library.calls[-2:] == ["cuGraphLaunch", "cuGraphExecDestroy"]


def test_work_that_fails_ends_the_capture_and_its_own_error_is_raised() -> None:
    library = FakeLibrary()

    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Capture(library).record(STREAM, work)
    assert library.calls == ["cuStreamBeginCapture_v2", "cuStreamEndCapture"]


def test_what_the_driver_refuses_is_told_in_its_words() -> None:
    with pytest.raises(Permanent, match=r"cuGraphLaunch: an illegal memory access was encountered \(700\)"):
        Capture(FakeLibrary("cuGraphLaunch")).launch(EXECUTABLE, STREAM)


def test_a_graph_that_cannot_be_made_executable_is_dropped() -> None:
    library = FakeLibrary("cuGraphInstantiateWithFlags")
    with pytest.raises(Permanent, match="cuGraphInstantiateWithFlags"):
        Capture(library).record(STREAM, lambda: None)
    assert "cuGraphDestroy" in library.calls
