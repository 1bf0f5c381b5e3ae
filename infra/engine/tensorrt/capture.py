"""CUDA graphs by the driver's own calls: pycuda has streams and copies, but no capture.

Refuses what the driver refuses, with its text. Invariant: a stream is never left capturing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from infra.errors import Permanent

# Calls of other threads neither join the capture nor are forbidden by it (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
_THREAD_LOCAL = 1
_SUCCESS = 0
_HANDLE = ctypes.c_void_p

# name -> types of its arguments; all return CUresult.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
    "cuStreamEndCapture": (_HANDLE, ctypes.POINTER(_HANDLE)),
    "cuGraphInstantiateWithFlags": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphDestroy": (_HANDLE,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Capture:
    """Captures and replays work of streams of the current context."""

    def __init__(self, library: Any) -> None:
        self._calls = {}
        for name, types in SIGNATURES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = list(types), ctypes.c_int
            self._calls[name] = call

    def record(self, stream: int, work: Callable[[], None]) -> int:
        """What `work` enqueues on the stream (a CUstream), as an executable graph to launch. Nothing runs yet."""
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        graph = _HANDLE()
        try:
            work()
        except BaseException:
            # Its own failure has ended the capture inside the driver; this takes the stream out of it.
            self._calls["cuStreamEndCapture"](stream, ctypes.byref(graph))
            raise
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        executable = _HANDLE()
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        finally:
            self._calls["cuGraphDestroy"](graph)
        return int(executable.value or 0)

    def launch(self, graph: int, stream: int) -> None:
        """Enqueue a graph."""
        self._call("cuGraphLaunch", graph, stream)

    def drop(self, graph: int) -> None:
        """Free a graph that does not run."""
        self._call("cuGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._calls[name](*arguments)
        if result != _SUCCESS:
            text = ctypes.c_char_p()
            self._calls["cuGetErrorString"](result, ctypes.byref(text))
            raise Permanent(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
