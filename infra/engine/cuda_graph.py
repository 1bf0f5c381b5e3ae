"""PyTorch under CUDA graphs, one per shape bucket: the engine of a GPU that has no TensorRT engine (an H200, say).

The model is the release's FP32 ONNX file: as one kernel where there is one for it (`fused.py`), or operation by
operation, in half precision unless FP32 is asked for. A lane copies its pinned buffer
to the GPU, computes and copies the scores back; all of that is captured once per bucket and replayed as one launch.
Refuses a machine without a CUDA device. Invariant: on the CPU (tests) the same lane runs the same work uncaptured;
recording it is the only line that needs CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from infra.engine.batch import Features
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Bucket, Grid, Layout, fill
from infra.engine.fused import fused_ranker
from infra.engine.run import EngineUnavailable
from infra.engine.torch_fused import fewer_kernels
from infra.engine.torch_graph import read_module, widths_of
from infra.errors import Permanent

if TYPE_CHECKING:
    from infra.release import Release, Role

F32 = NDArray[np.float32]

KIND = "cuda-graph"
KERNEL_KIND = "cuda-kernel"
# Requests on the GPU at once in one replica.
LANES = 2
# Runs before a capture: libraries choose their kernels and allocate their workspaces in them.
_WARM_RUNS = 2


def cuda_graph_engine(
    release: Release, _folder: Path, role: Role, precision: str, *, device: str = "cuda", compiled: bool = False
) -> BucketedEngine:
    """The engine of a role in "fp16" or "fp32"; it loads when asked to. `compiled` lets Inductor fuse what lies between
    the matrix products, for seconds of start-up per bucket."""
    path = release.path / release.manifest.models[role]["fp32"]
    opens = partial(open_session, path, torch.device(device), half=precision == "fp16", compiled=compiled)
    return BucketedEngine(KIND, precision, opens)


def cuda_kernel_engine(release: Release, role: Role, *, device: str = "cuda") -> BucketedEngine:
    """The engine of a role whose model is one kernel, in FP16; it loads when asked to."""
    path = release.path / release.manifest.models[role]["fp32"]
    return BucketedEngine(KERNEL_KIND, "fp16", partial(open_kernel_session, path, torch.device(device)))


def open_kernel_session(path: Path, device: torch.device, grid: Grid) -> TorchSession:
    """The model as one kernel, which takes and gives FP32. Raises EngineUnavailable without that device or when no
    kernel computes the model, ReleaseRefused when the file is no ranker; preparing a lane raises what Triton raises
    when it cannot compile."""
    _require(device)
    return TorchSession(fused_ranker(read_module(path)).to(device), device, torch.float32, widths_of(path), grid)


def open_session(path: Path, device: torch.device, grid: Grid, *, half: bool, compiled: bool = False) -> TorchSession:
    """The model operation by operation, with its lanes. Raises EngineUnavailable without that device, ReleaseRefused
    when the file is no ranker that PyTorch can compute."""
    _require(device)
    module: nn.Module = fewer_kernels(read_module(path, half=half)).to(device)
    if compiled:
        # Left to choose, Dynamo fixes the first shape and frees the axes with the second: a few compilations in all.
        module = cast(nn.Module, torch.compile(module))
    return TorchSession(module, device, torch.float16 if half else torch.float32, widths_of(path), grid)


def _require(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("PyTorch sees no CUDA device (no GPU, no driver, or a build of torch for the CPU)")


class TorchSession:
    """The module, which takes inputs of `kind`, and its lanes on one device."""

    def __init__(
        self, module: nn.Module, device: torch.device, kind: torch.dtype, widths: tuple[int, int], grid: Grid
    ) -> None:
        self.widths = widths
        self.module = module
        self.kind = kind
        self.lanes: Sequence[TorchLane] = [TorchLane(module, device, kind, widths, grid.largest) for _ in range(LANES)]

    def memory_bytes(self) -> int:
        """Of weights and static buffers, and what the graphs hold on the GPU."""
        weights = sum(buffer.nbytes for buffer in self.module.buffers())
        return weights + sum(lane.memory_bytes() for lane in self.lanes)

    def close(self) -> None:
        """Drop graphs, buffers and weights."""
        self.lanes = ()
        self.module = nn.Module()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class TorchLane:
    """One request in flight: static buffers and a recorded piece of work per bucket."""

    def __init__(
        self, module: nn.Module, device: torch.device, kind: torch.dtype, widths: tuple[int, int], largest: Bucket
    ) -> None:
        self._module = module
        self._device = device
        self._kind = kind
        self._widths = widths
        most = Layout(largest, *widths)
        on_gpu = device.type == "cuda"
        self._sent = torch.zeros(most.numbers, pin_memory=on_gpu)
        self._inputs = torch.zeros(most.numbers, device=device)
        self._received = torch.zeros(most.scores, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._graph_bytes = 0
        self._work: dict[Bucket, Callable[[], None]] = {}
        self._views: dict[Bucket, Features] = {}

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Record the work of each bucket."""
        before = torch.cuda.memory_reserved(self._device) if self._stream else 0
        for bucket in buckets:
            layout = Layout(bucket, *self._widths)
            self._views[bucket] = layout.views(self._sent.numpy())
            work = partial(self._enqueue, layout)
            self._work[bucket] = self._recorded(work) if self._stream else work
        if self._stream:
            self._graph_bytes = torch.cuda.memory_reserved(self._device) - before

    @torch.inference_mode()
    def score(self, bucket: Bucket, part: Features) -> F32:
        """See `Lane.score`."""
        fill(self._views[bucket], part)
        try:
            if self._stream:
                with torch.cuda.stream(self._stream):
                    self._work[bucket]()
                self._stream.synchronize()
            else:
                self._work[bucket]()
        except RuntimeError as error:
            raise Permanent(f"PyTorch: {error}") from error
        return self._received.numpy()[: bucket.batch * bucket.candidates].reshape(bucket.batch, bucket.candidates)

    def work(self, bucket: Bucket) -> Callable[[], None]:
        """What `score` runs for a bucket: copy in, compute, copy out. For benchmarks."""
        return self._work[bucket]

    def memory_bytes(self) -> int:
        """Of buffers and graphs, on both sides."""
        return self._graph_bytes + self._inputs.nbytes + self.pinned_bytes()

    def pinned_bytes(self) -> int:
        """Of the buffers in host memory."""
        return self._sent.nbytes + self._received.nbytes

    def _enqueue(self, layout: Layout) -> None:
        """Copy in, compute, copy out; on a GPU none of it waits."""
        numbers, scores, offsets = layout.numbers, layout.scores, layout.offsets()
        self._inputs[:numbers].copy_(self._sent[:numbers], non_blocking=True)
        # One cast for all inputs: a kernel each would cost as much as some of the model's.
        given = self._inputs[:numbers].to(self._kind)
        inputs = [
            given[offsets[name] : offsets[name] + int(np.prod(shape))].view(shape)
            for name, shape in layout.shapes().items()
        ]
        # A copy between host and GPU that changes the type too is made in pieces that wait.
        made = self._module(*inputs).reshape(-1).float()
        self._received[:scores].copy_(made, non_blocking=True)

    @torch.inference_mode()
    def _recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as one launch. Graphs of a lane share memory: they never run at once, and leave nothing in it."""
        # Buffers were zeroed on another stream.
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_RUNS):
                work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another engine of this process may be serving from another thread meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
