"""Every engine of a release that this machine can run, measured beside PyTorch eager in the paper's form.

Each engine is opened as a replica opens it and has to agree with the recorded scores before it is measured; what cannot
be opened is listed with the reason. One thread. Invariant: engines and peer of one shape run in turn, in one process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_ranker.recorded import RecordedInputs, recorded_inputs
from edge_ranker.verify import RecordedCheck
from feature_service.schema import FeatureSchema, schema_of
from infra.engine.choose import Offer, Refusal, open_engine
from infra.engine.measure import Agreement, Timing, agreement, resident_bytes, take_turns
from infra.engine.names import on_gpu
from infra.engine.offers import engine_folder, offers_of
from infra.engine.run import Engine
from infra.engine.store import EngineStore
from infra.release import Precision, Release, Role

F32 = NDArray[np.float32]
# Requests, history tokens, candidates.
Shape = tuple[int, int, int]

PEER = "PyTorch eager, paper's form"
GPU_PEER = "PyTorch eager, paper's form, on the GPU"


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one shape. `times_faster` than the peer at this shape: on the CPU by time on a core, which
    neighbours hardly change; of an engine that waits for a GPU by wall time, than the peer on that GPU."""

    role: Role
    engine: str
    shape: str
    timing: Timing
    times_faster: float


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine whatever the shape. `resident_bytes`: what the process grew by when it was opened and checked."""

    role: Role
    engine: str
    memory_bytes: int
    resident_bytes: int
    file_bytes: int
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured."""

    release: str
    machine: dict[str, Any]
    engines: list[EngineFacts]
    rows: list[Row]
    unavailable: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Measurement:
    """Measures the engines of one release."""

    def __init__(self, release: Release, folder: Path | None, names: Sequence[str]) -> None:
        self._release = release
        self._folder = folder or engine_folder(release.path.resolve())
        self._names = names
        self._schema = schema_of(release.manifest.schema, release.manifest.schema_fingerprint)

    def report(
        self, roles: Sequence[Role], shapes: Sequence[Shape], seconds: float, told: Callable[[str], None]
    ) -> Report:
        """Measure; `told` hears what is being done. Raises ReleaseRefused."""
        import torch

        torch.set_num_threads(1)
        recorded = recorded_inputs(self._release)
        load_before = os.getloadavg()
        engines: list[EngineFacts] = []
        rows: list[Row] = []
        unavailable: dict[str, str] = {}
        for role in roles:
            opened: dict[str, Engine] = {}
            check = RecordedCheck(role, self._schema, recorded)
            for offer in offers_of(self._release, self._folder, role, self._names):
                told(f"{role}: opening {offer.name}")
                before = resident_bytes()
                result = open_engine(role, offer, check)
                if isinstance(result, Refusal):
                    unavailable[f"{role} {offer.name}"] = f"{result.cause}: {result.reason}"
                    continue
                opened[offer.name] = result.engine
                engines.append(self._facts(role, offer, result.engine, recorded, before))
            for shape in shapes:
                told(f"{role}: {_text(shape)}")
                rows += self._rows(role, opened, shape, seconds)
            for engine in opened.values():
                engine.close()
        return Report(self._release.manifest.name, _machine(load_before), engines, rows, unavailable)

    def _rows(self, role: Role, opened: dict[str, Engine], shape: Shape, seconds: float) -> Iterator[Row]:
        batch = random_batch(self._schema, shape)
        runs: dict[str, Callable[[], object]] = {name: partial(engine.run, *batch) for name, engine in opened.items()}
        gpus = {name for name in opened if on_gpu([name])}
        gpu_peer = GPU_PEER if gpus and _has_cuda() else PEER
        if gpu_peer == GPU_PEER:
            runs[GPU_PEER] = _peer(role, self._schema, batch, "cuda")
        if gpu_peer == PEER or len(gpus) < len(opened):
            runs[PEER] = _peer(role, self._schema, batch, "cpu")
        timings = take_turns(runs, seconds, shape[0])
        for name, timing in timings.items():
            if name in gpus or name == GPU_PEER:
                ratio = timings[gpu_peer].p50_ms / timing.p50_ms
            else:
                ratio = timings[PEER].cpu_p50_ms / timing.cpu_p50_ms
            yield Row(role, name, _text(shape), timing, ratio)

    def _facts(
        self, role: Role, offer: Offer, engine: Engine, recorded: Sequence[RecordedInputs], before: int
    ) -> EngineFacts:
        grown = max(0, resident_bytes() - before)
        served = [
            engine.run(r.inputs.hist[None], r.inputs.target[None], r.inputs.mask[None], r.inputs.user[None])[0]
            for r in recorded
        ]
        logits = [r.edge_logits if role == "edge" else r.rerank_logits for r in recorded]
        taken = [
            request.candidates.index(request.taken) if request.taken in request.candidates else None
            for request in self._release.requests()
        ]
        return EngineFacts(
            role=role,
            engine=offer.name,
            memory_bytes=engine.memory_bytes(),
            resident_bytes=grown,
            file_bytes=self._file_bytes(role, offer),
            agreement=agreement(logits, served, taken),
        )

    def _file_bytes(self, role: Role, offer: Offer) -> int:
        """Of the file the engine was loaded from: a built one, or the release's ONNX file."""
        for entry in EngineStore(self._folder).entries():
            if (entry.role, entry.precision, entry.builder) == (role, offer.precision, offer.kind):
                return (self._folder / entry.file).stat().st_size
        precision: Precision = "int8-cpu" if offer.name == "onnxruntime-cpu:int8" else "fp32"
        path = self._release.model(role, precision)
        return 0 if path is None else path.stat().st_size


def random_batch(schema: FeatureSchema, shape: Shape) -> tuple[F32, F32, F32, F32]:
    """Inputs of one shape; what the numbers are does not change the time."""
    n_requests, length, n = shape
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((n_requests, length, schema.token_dim), np.float32),
        rng.standard_normal((n_requests, n, schema.token_dim), np.float32),
        np.ones((n_requests, length), np.float32),
        rng.standard_normal((n_requests, schema.user_dim), np.float32),
    )


def _has_cuda() -> bool:
    """Whether PyTorch can use the GPU that an engine runs on."""
    import torch

    return torch.cuda.is_available()


def _peer(
    role: Role, schema: FeatureSchema, batch: tuple[F32, F32, F32, F32], device: Literal["cpu", "cuda"]
) -> Callable[[], object]:
    """The model classes as published, run eagerly: the MLP, and the BST with one copy of the history per candidate.
    With random weights, which take as long as trained ones. From host memory to host memory, as an engine runs."""
    import torch

    from edge_ranker.model import EdgeMLP
    from reranker.model import BST

    widths = schema.token_dim, schema.user_dim
    model = (EdgeMLP(*widths) if role == "edge" else BST(*widths, mode="full")).eval().to(device)
    inputs = tuple(torch.from_numpy(array) for array in batch)

    def run() -> object:
        with torch.inference_mode():
            return model(*(x.to(device) for x in inputs)).cpu()

    return run


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _machine(load_before: tuple[float, float, float]) -> dict[str, Any]:
    import onnxruntime
    import torch

    from infra.engine.isa import cpu_isa

    return {
        "cpu": cpu_isa(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": 1,
        "load_before": round(load_before[0], 2),
        "load_after": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
