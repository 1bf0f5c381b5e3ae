"""PyTorch on the CPU: eagerly from the release's ONNX file, or ahead of time, compiled by AOTInductor.

The eager engine is the last in every chain: it needs no artefact and shares no code with ONNX Runtime. A compiled one
is machine code: it is loaded only when its digest is the builder's and this CPU has the instructions it was built for.
Importing torch takes a second and 200 MB, so it is imported by `load`, and not before the artefact was found good.
Invariant: one thread per engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from infra.engine.batch import Padded
from infra.engine.isa import cpu_isa
from infra.engine.run import NonFiniteScores
from infra.engine.store import EngineStore
from infra.errors import Permanent

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

F32 = NDArray[np.float32]
BUILDER = "aotinductor"


class TorchCpuEngine:
    """The operations of an ONNX file, one by one, by PyTorch."""

    kind = "torch-cpu"
    batching = Padded()
    precision = "fp32"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._module: Callable[..., Tensor] | None = None
        self._bytes = 0

    def load(self) -> None:
        """Read the graph. Raises EngineUnavailable without the file or for an operator that is not known."""
        import torch

        from infra.engine.torch_graph import read_module

        torch.set_num_threads(1)
        module = read_module(self._path)
        self._bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        self._module = module

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """See `infra.engine.run.Engine`."""
        return _run(self._module, self._path.name, hist, target, mask, user)

    def close(self) -> None:
        """Forget the module."""
        self._module, self._bytes = None, 0

    def memory_bytes(self) -> int:
        """Weights and other constants."""
        return self._bytes


class AotInductorEngine:
    """A ranker compiled for this kind of CPU by `trirank release build --targets cpu`."""

    kind = "aotinductor"
    batching = Padded()
    precision = "fp32"

    def __init__(self, store: EngineStore, role: str, onnx: Path) -> None:
        self._store = store
        self._role = role
        self._onnx = onnx
        self._model: Callable[..., Tensor] | None = None
        self._bytes = 0
        self._shapes: dict[str, int] = {}

    def load(self) -> None:
        """Load what was built. Raises EngineUnavailable: absent, damaged, of another file, torch or CPU."""
        entry, package = self._store.find(
            role=self._role,
            precision=self.precision,
            builder=BUILDER,
            version=builder_version(),
            sm=None,
            driver=None,
            onnx=self._onnx,
        )
        import torch
        from torch._inductor import aoti_load_package

        torch.set_num_threads(1)
        # The bytes that were checked are the ones that are run: the file itself may be replaced meanwhile.
        with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
            file.write(package)
            file.flush()
            self._model = aoti_load_package(file.name, run_single_threaded=True)
        self._bytes, self._shapes = len(package), entry.shapes

    def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
        """See `infra.engine.run.Engine`."""
        if self._model is not None:
            self._check(hist, target, mask, user)
        return _run(self._model, f"{self._role} by AOTInductor", hist, target, mask, user)

    def close(self) -> None:
        """Unload."""
        self._model, self._bytes = None, 0

    def memory_bytes(self) -> int:
        """The package, code and weights; its buffers are of one run."""
        return self._bytes

    def _check(self, hist: F32, target: F32, mask: F32, user: F32) -> None:
        """Compiled code trusts its caller: what it was not built for it would read from beyond the arrays."""
        built, (n_batch, length, token) = self._shapes, hist.shape
        agree = target.shape == (n_batch, target.shape[1], token) and mask.shape == (n_batch, length)
        fits = n_batch <= built["batch"] and length <= built["history"] and target.shape[1] <= built["candidates"]
        if not (agree and fits and token == built["token"] and user.shape == (n_batch, built["user"])):
            shapes = [array.shape for array in (hist, target, mask, user)]
            raise Permanent(f"{self._role} by AOTInductor: not built for {shapes}, but for {built}")


def builder_version() -> str:
    """What a compiled engine has to match: the torch it was built by, and the instructions it was built for."""
    from importlib.metadata import version

    return f"torch {version('torch')} for {cpu_isa()}"


def _run(model: Callable[..., Tensor] | None, name: str, *batch: F32) -> F32:
    if model is None:
        raise Permanent(f"{name}: not loaded")
    import torch

    # torch shares memory with an array, and only with one that may be written to; what came by wire may not.
    tensors = [torch.from_numpy(np.require(array, np.float32, ("C", "W"))) for array in batch]
    try:
        with torch.inference_mode():
            scores = model(*tensors)
    except RuntimeError as error:
        raise Permanent(f"{name}: {error}") from error
    logits = scores.numpy().reshape(batch[1].shape[:2])
    if not np.isfinite(logits).all():
        raise NonFiniteScores(f"{name}: scores are not finite")
    return logits
