"""Rankers as one kernel: on the GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import nn

from edge_ranker.model import EdgeMLP
from infra.engine import cuda_graph
from infra.engine.bucketed import BucketedEngine
from infra.engine.buckets import Grid
from infra.engine.choose import Offer, choose
from infra.engine.cuda_graph import TorchSession, cuda_graph_engine, cuda_kernel_engine, open_kernel_session
from infra.engine.export import export_ranker
from infra.engine.fused import fused_ranker
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.run import Engine, EngineUnavailable
from infra.engine.torch_graph import module_of
from infra.release import Role
from reranker.deep import DeepBST
from reranker.din import DIN
from reranker.model import BST
from tests.gpu_release import write_gpu_release
from tests.quantised_models import TOKEN, USER, exported
from tests.tables import NUMPY_MAY_OVERFLOW, need_triton

need_triton()
pytestmark = [NUMPY_MAY_OVERFLOW, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]
ROLES: tuple[Role, ...] = ("edge", "rerank")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(model: onnx.ModelProto) -> nn.Module | None:
    try:
        return fused_ranker(module_of(model, "ranker")).to(DEVICE)
    except EngineUnavailable:
        return None


@cache
def both(role: Role) -> tuple[nn.Module, nn.Module]:
    """The graph in FP32, and the kernel."""
    model = spread(exported(role))
    made = fused(model)
    assert made is not None
    return module_of(model, role).to(DEVICE), made


def spread(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with larger weights: logits of fresh ones are all alike, and would agree whatever was computed."""
    model = deepcopy(model)
    for weight in model.graph.initializer:
        if len(weight.dims) == 2:
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(2.5), weight.name))
    return model


@cache
def written(model: type[nn.Module], token: int, user: int, **options: int | str) -> onnx.ModelProto:
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        torch.manual_seed(5)
        file = Path(folder) / "ranker.onnx"
        export_ranker(model(token, user, **options), file, token_dim=token, user_dim=user)
        return onnx.load(file)


def inputs(batch: int, length: int, candidates: int, token: int = TOKEN, user: int = USER) -> list[torch.Tensor]:
    """Random rows; the history of the last request is empty."""
    random = torch.Generator().manual_seed(batch * length + candidates)
    shapes = ((batch, length, token), (batch, candidates, token), (batch, length), (batch, user))
    hist, target, mask, of_user = (torch.randn(shape, generator=random) / 2 for shape in shapes)
    mask = (mask > -0.2).float()
    mask[-1] = 0.0
    return [part.to(DEVICE) for part in (hist * mask.unsqueeze(2), target, mask, of_user)]


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """As far apart as half precision puts them."""
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.01 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("role", ROLES)
@given(batch=st.integers(1, 3), length=st.integers(1, 100), candidates=st.integers(1, 40))
@settings(max_examples=8, deadline=None)
def test_logits_are_the_graphs_to_half_precision(role: Role, batch: int, length: int, candidates: int) -> None:
    plain, kernel = both(role)
    given_inputs = inputs(batch, length, candidates)
    with torch.inference_mode():
        assert_near(kernel(*given_inputs), plain(*given_inputs))


@pytest.mark.parametrize("role", ROLES)
def test_logits_of_a_large_batch_come_from_large_blocks(role: Role) -> None:
    plain, kernel = both(role)
    given_inputs = inputs(16, 20, 150)
    with torch.inference_mode():
        assert_near(kernel(*given_inputs), plain(*given_inputs))


@pytest.mark.parametrize(("model", "token", "user"), [(BST, 96, 5), (EdgeMLP, 40, 20)])
def test_widths_that_are_no_powers_of_two_are_padded(model: type[nn.Module], token: int, user: int) -> None:
    onnx_model = spread(written(model, token, user))
    kernel = fused(onnx_model)
    assert kernel is not None
    given_inputs = inputs(3, 7, 19, token, user)
    with torch.inference_mode():
        assert_near(kernel(*given_inputs), module_of(onnx_model, "ranker").to(DEVICE)(*given_inputs))


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_written_behind_the_last_candidate_nor_read_behind_the_last_token(role: Role) -> None:
    _, kernel = both(role)
    hist, target, mask, user = inputs(2, 7, 19)

    def among_nan(x: torch.Tensor) -> torch.Tensor:
        """The same numbers, with NaN in memory on both sides."""
        around = torch.full((x.numel() + 2000,), torch.nan, device=DEVICE)
        around[1000:-1000] = x.flatten()
        return around[1000:-1000].view(x.shape)

    with torch.inference_mode():
        expected = kernel(hist, target, mask, user)
        got = kernel(*(among_nan(x) for x in (hist, target, mask, user)))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("role", ROLES)
def test_an_input_that_is_not_finite_gives_logits_that_are_not(role: Role) -> None:
    _, kernel = both(role)
    hist, target, mask, user = inputs(2, 7, 19)
    target[0, 3, 0] = torch.nan
    with torch.inference_mode():
        logits = kernel(hist, target, mask, user)
    assert logits[0, 3].isnan()
    assert logits.isnan().sum() == 1


@pytest.mark.parametrize(
    "model",
    [
        lambda: written(DIN, TOKEN, USER),
        lambda: written(DeepBST, TOKEN, USER, blocks=2, readout="mean", max_history=50),
    ],
)
def test_other_architectures_are_left_to_pytorch(model: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    onnx_model = model()
    assert fused(onnx_model) is None
    onnx.save(onnx_model, tmp_path / "ranker.onnx")
    given_inputs = inputs(2, 7, 19)
    expected = OnnxEngine(tmp_path / "ranker.onnx").run(*(part.cpu().numpy() for part in given_inputs))
    with torch.inference_mode():
        got = module_of(onnx_model, "ranker").to(DEVICE)(*given_inputs).cpu().numpy()
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("role", ROLES)
def test_a_lane_runs_the_kernel_in_buckets(role: Role, tmp_path: Path) -> None:
    model = spread(exported(role))
    onnx.save(model, tmp_path / "ranker.onnx")
    kernel = fused(model)
    assert kernel is not None
    engine = BucketedEngine(
        "cuda-graph",
        "fp16",
        lambda grid: TorchSession(kernel, torch.device(DEVICE), torch.float32, (TOKEN, USER), grid),
        grid=Grid(batches=(1, 2), lengths=(10, 20), candidates=(16, 24)),
    )
    for shape in ((1, 7, 19), (3, 20, 30)):
        asked = [part.cpu().numpy() for part in inputs(*shape)]
        expected = OnnxEngine(tmp_path / "ranker.onnx").run(*asked)
        assert_near(torch.from_numpy(engine.run(*asked)), torch.from_numpy(expected))
    engine.close()


@pytest.mark.parametrize("role", ROLES)
def test_the_engine_serves_a_release_and_refuses_a_model_without_a_kernel(role: Role, tmp_path: Path) -> None:
    release = write_gpu_release(tmp_path / "small", ("fp32",))
    engine = cuda_kernel_engine(release, role, device=DEVICE)
    assert (engine.kind, engine.precision) == ("cuda-kernel", "fp16")
    asked = [part.cpu().numpy() for part in inputs(2, 7, 19)]
    expected = OnnxEngine(release.path / release.manifest.models[role]["fp32"]).run(*asked)
    assert_near(torch.from_numpy(engine.run(*asked)), torch.from_numpy(expected))
    engine.close()
    onnx.save(changed("rerank", "LeakyRelu", alpha=0.2), tmp_path / "other.onnx")
    with pytest.raises(EngineUnavailable, match="no kernel computes this model"):
        open_kernel_session(tmp_path / "other.onnx", torch.device(DEVICE), Grid())


def test_a_kernel_that_does_not_compile_is_refused_and_the_operations_are_tried_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken(nn.Module):
        def forward(self, *_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("Failed to find C compiler")

    class AnyScores:
        def whole(self, engine: Engine) -> None:
            engine.run(*(part.cpu().numpy() for part in inputs(1, 3, 4)))

        quick = whole

        def seconds(self, engine: Engine) -> float:
            return 1.0

    release = write_gpu_release(tmp_path / "small", ("fp32",))
    monkeypatch.setattr(cuda_graph, "fused_ranker", lambda _: Broken())
    offers = [
        Offer("cuda-kernel", "fp16", lambda: cuda_kernel_engine(release, "edge", device=DEVICE), heavy=True),
        Offer("cuda-graph", "fp16", lambda: cuda_graph_engine(release, tmp_path, "edge", "fp16", device=DEVICE), True),
    ]
    opened, _, refusals = choose("edge", offers, AnyScores(), measured=True)
    assert [one.offer.name for one in opened] == ["cuda-graph:fp16"]
    assert [(r.name, r.cause) for r in refusals] == [("cuda-kernel:fp16", "failed")]
    assert "Failed to find C compiler" in refusals[0].reason
    opened[0].engine.close()


def changed(role: Role, node: str, **attributes: float) -> onnx.ModelProto:
    """The role's model with other attributes at the first node of an operator."""
    model = deepcopy(exported(role))
    (first, *_) = (n for n in model.graph.node if n.op_type == node)
    for attribute in first.attribute:
        if attribute.name in attributes:
            value = attributes[attribute.name]
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: changed("rerank", "LeakyRelu", alpha=0.2),
        lambda: changed("rerank", "Softmax", axis=1),
        lambda: changed("edge", "Gemm", alpha=2.0),
        lambda: changed("rerank", "Gemm", beta=0.5),
    ],
)
def test_a_graph_that_differs_in_one_number_is_another_formula(model: Callable[[], onnx.ModelProto]) -> None:
    assert fused(model()) is None


def test_keys_of_history_and_candidate_that_come_from_other_weights_are_another_formula() -> None:
    model = deepcopy(exported("rerank"))
    name = next(n.input[1] for n in model.graph.node if n.op_type == "MatMul" and n.input[0] == "hist")
    (weight,) = (w for w in model.graph.initializer if w.name == name)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), name))
    assert fused(model) is None


def test_other_weights_are_other_logits() -> None:
    model = deepcopy(exported("edge"))
    (weight,) = (w for w in model.graph.initializer if w.name == "second.weight")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
    kernel = fused(model)
    assert kernel is not None
    given_inputs = inputs(1, 5, 9)
    with torch.inference_mode():
        got, expected = kernel(*given_inputs), module_of(model, "edge").to(DEVICE)(*given_inputs)
        assert_near(got, expected)
        assert (got - fused(exported("edge"))(*given_inputs)).abs().max() > 0.01  # type: ignore[misc]
