"""Small lookups as CUDA graphs: launching the kernel anew costs more than it takes.

Graphs are captured for a few sizes when the table warms up, and a lookup takes the smallest that is large enough. They
read the arrays of the table where they are, so they stay right. The kernel reads the keys from pinned host memory
itself: a copy would queue behind those of arriving batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from param_server.contract import F32, I64
from param_server.table import Bool
from param_server.table.gpu_host import to_host

_SMALLEST = 256


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    keys: I64
    out: Tensor
    found: Tensor


class LookupGraphs:
    """Lookups of at most `most_keys` keys; `fill(keys, out, found)` puts the kernel on the current stream."""

    def __init__(self, fill: Callable[[Tensor, Tensor, Tensor], None], dim: int, most_keys: int) -> None:
        self._fill = fill
        self._dim = dim
        self.most_keys = most_keys
        self._captured: dict[int, _Captured] = {}

    def capture(self) -> None:
        """Capture every size. Compiles the kernel if nobody has; takes seconds then."""
        size = _SMALLEST
        while True:
            size = min(size, self.most_keys)
            self._captured[size] = self._capture(size)
            if size == self.most_keys:
                return
            size *= 2

    def lookup(self, keys: I64) -> tuple[F32, Bool]:
        """Rows f32[n, dim] and found bool[n], copies of their own, for 1 <= n <= most_keys keys."""
        n = keys.size
        captured = self._captured[min(max(_SMALLEST, 1 << (n - 1).bit_length()), self.most_keys)]
        captured.keys[:n] = keys
        captured.graph.replay()
        rows, found = to_host([captured.out[:n], captured.found[:n]])
        return rows, found.view(np.bool_)

    def _capture(self, size: int) -> _Captured:
        keys = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        out = torch.empty((size, self._dim), dtype=torch.float32, device="cuda")
        found = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._fill(keys, out, found)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._fill(keys, out, found)
        return _Captured(graph, keys.numpy(), out, found)
